"""The JSON of answers: choices, log-probabilities, usage, stream chunks."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from workers.native.engine.sequence import Token
from workers.native.models.tokenizer import Tokenizer
from workers.native.sampling.sampler import TokenLogprob

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return (
        b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def usage(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """Return the usage object; cached tokens are part of the prompt tokens."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of one answer repeats."""

    prefix: str
    kind: str
    model: str
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return a whole answer or one chunk of it."""
        return {
            "id": f"{self.prefix}-{self.answer_id}",
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Token]) -> dict[str, Any]:
    """Return `logprobs` of a chat choice."""
    content = []
    for token in tokens:
        if token.logprob is None:
            continue
        entry = _chat_entry(tokenizer, token.logprob)
        entry["top_logprobs"] = [_chat_entry(tokenizer, rival) for rival in token.top]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(entry.token_id),
        "logprob": entry.logprob,
        "bytes": list(tokenizer.token_bytes(entry.token_id)),
    }


LogprobEntry = tuple[int, TokenLogprob | None, tuple[TokenLogprob, ...]]


def completion_logprobs(
    tokenizer: Tokenizer, entries: Iterable[LogprobEntry], offset: int = 0
) -> dict[str, Any]:
    """Return `logprobs` of a completions choice. `entries` are (id, chosen, rivals); the first
    prompt token has neither. `offset` is where in the text the first entry begins.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, logprob, rivals in entries:
        text = tokenizer.token_text(token_id)
        tokens.append(text)
        chosen.append(None if logprob is None else logprob.logprob)
        top.append(
            {tokenizer.token_text(r.token_id): r.logprob for r in rivals} if rivals else None
        )
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": top,
        "text_offset": offsets,
    }
