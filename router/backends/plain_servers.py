"""Which server answers behind a plain OpenAI API, and what more it tells about itself.

Each question goes to a route that only one kind of server has; the first answer that fits names
it. A server that answers none of them is served all the same, as `openai`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from router.backends.model_list import ModelCard, parse_models
from router.backends.probing import get_json
from router.errors import UpstreamError
from router.origin import Origin
from router.upstream import Upstream
from router.wire import Headers

T = TypeVar("T")
UNKNOWN_RUNNING = 256
"""Requests at once, for a server that tells no limit and is of no known kind."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What was found out. `max_running` 0 and `context_tokens` 0: it does not tell.

    `usual_running` is what this kind of server runs at once unless somebody set it otherwise, by
    the setting that `limit_setting` names.
    """

    engine: str = "openai"
    version: str = ""
    max_running: int = 0
    usual_running: int = UNKNOWN_RUNNING
    limit_setting: str = "the server's own limit"
    context_tokens: int = 0
    cards: tuple[ModelCard, ...] = ()


async def identify(upstream: Upstream, origin: Origin, headers: Headers) -> ServerKind:
    """Ask each question in turn. No answer to any of them is an answer too: never raises."""
    for path, read in _QUESTIONS:
        kind = await _ask(upstream, origin, path, headers, read)
        if kind is not None and kind.engine == "ollama":
            version = await _ask(upstream, origin, b"/api/version", headers, _ollama_version)
            kind = replace(kind, version=version or "")
        if kind is not None:
            return kind
    return ServerKind()


async def _ask(
    upstream: Upstream, origin: Origin, path: bytes, headers: Headers, read: Callable[[bytes], T]
) -> T | None:
    try:
        status, body = await get_json(upstream, origin, path, headers)
        return read(body) if status == 200 else None
    except (UpstreamError, ValueError):
        return None


class _OllamaModel(msgspec.Struct):
    name: str
    digest: str


class _Ollama(msgspec.Struct):
    models: list[_OllamaModel]


def _ollama(body: bytes) -> ServerKind:
    """Ollama runs one request of a model at a time unless it is told otherwise."""
    msgspec.json.decode(body, type=_Ollama)
    limit = "its OLLAMA_NUM_PARALLEL"
    return ServerKind("ollama", usual_running=1, limit_setting=limit, cards=parse_models(body))


class _OllamaVersion(msgspec.Struct):
    version: str


def _ollama_version(body: bytes) -> str:
    return msgspec.json.decode(body, type=_OllamaVersion).version


class _LmStudioModel(msgspec.Struct):
    id: str
    state: str
    compatibility_type: str


class _LmStudio(msgspec.Struct):
    data: list[_LmStudioModel]


def _lm_studio(body: bytes) -> ServerKind:
    """LM Studio tells which models are loaded, and with which context."""
    msgspec.json.decode(body, type=_LmStudio)
    limit = "its max concurrent predictions"
    return ServerKind("lmstudio", usual_running=4, limit_setting=limit, cards=parse_models(body))


class _Tgi(msgspec.Struct):
    model_id: str
    max_concurrent_requests: int
    max_total_tokens: int = 0
    max_input_tokens: int = 0
    version: str = ""


def _tgi(body: bytes) -> ServerKind:
    """Text Generation Inference: `max_total_tokens` bounds prompt and answer together."""
    told = msgspec.json.decode(body, type=_Tgi)
    return ServerKind(
        "tgi",
        told.version,
        max_running=max(0, told.max_concurrent_requests),
        context_tokens=max(0, told.max_total_tokens or told.max_input_tokens),
        cards=(ModelCard(told.model_id),),
    )


class _LiteLlm(msgspec.Struct):
    litellm_version: str


def _litellm(body: bytes) -> ServerKind:
    """The LiteLLM proxy: others serve behind it."""
    return ServerKind("litellm", msgspec.json.decode(body, type=_LiteLlm).litellm_version)


_QUESTIONS: tuple[tuple[bytes, Callable[[bytes], ServerKind]], ...] = (
    (b"/api/tags", _ollama),
    (b"/api/v0/models", _lm_studio),
    (b"/info", _tgi),
    (b"/health/readiness", _litellm),
)
