"""`GET /v1/models` as servers really answer it.

Seen in the wild: `{"data": [...]}` (OpenAI and most others), `data: null` where no model is there
(Ollama), a `models` key (llama.cpp beside `data`), a bare list (Together), plain names in place of
objects, and a context length under one of many names (vLLM, SGLang: `max_model_len`; OpenRouter,
Together: `context_length`; Groq: `context_window`; Mistral, LM Studio: `max_context_length`;
llama.cpp: `meta.n_ctx_train`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

_NAMES = ("id", "model", "name")
_CONTEXTS = (
    "loaded_context_length",  # what it runs with, where a server tells both
    "max_model_len",
    "context_length",
    "context_window",
    "max_context_length",
)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model of a server. `context_tokens` 0: it does not tell."""

    name: str
    context_tokens: int = 0


def parse_models(body: bytes) -> tuple[ModelCard, ...]:
    """Read a model list, each name once. Raises ValueError when the body is none."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ValueError(f"it is no JSON ({error})") from error
    if isinstance(found, dict):
        if not found.keys() & {"data", "models"}:
            raise ValueError("it has neither data nor models")
        found = found.get("data") or found.get("models") or []
    if not isinstance(found, list):
        raise ValueError("its models are no list")
    cards = [_card(each) for each in found]
    return tuple({card.name: card for card in cards}.values())


def context_tokens(cards: tuple[ModelCard, ...], wanted: str) -> int:
    """Return the context of the model `wanted`, or the longest of all where none is; 0: unknown."""
    of_wanted = [card.context_tokens for card in cards if wanted in ("", card.name)]
    return max(of_wanted, default=0)


def _card(entry: object) -> ModelCard:
    if isinstance(entry, str) and entry:
        return ModelCard(entry)
    if isinstance(entry, dict):
        names = (entry.get(key) for key in _NAMES)
        name = next((each for each in names if isinstance(each, str) and each), None)
        if name is not None:
            return ModelCard(name, _context(entry))
    raise ValueError("one of its entries names no model")


def _context(entry: Mapping[str, Any]) -> int:
    meta = entry.get("meta")
    told = [entry.get(key) for key in _CONTEXTS]
    told.append(meta.get("n_ctx_train") if isinstance(meta, dict) else None)
    numbers = (each for each in told if isinstance(each, int) and not isinstance(each, bool))
    return next((number for number in numbers if number > 0), 0)
