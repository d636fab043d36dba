"""The JSON bodies of the fake OpenAI server."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from router.testing.script import Script

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
DONE_EVENT = b"data: [DONE]\n\n"
DEFAULT_OUTPUT_TOKENS = 16
CONTEXT_TOKENS = 1_000_000
MAX_CHOICES = 16
CREATED = 1_700_000_000


@dataclass(frozen=True, slots=True)
class Asked:
    """What the fake reads of a generation request; everything else is ignored.

    `timings` are llama.cpp's, told in the last chunk; their `cache_n` is told in usage too.
    """

    chat: bool
    model: str
    stream: bool
    include_usage: bool
    output_tokens: int
    prompt_tokens: int
    choices: int
    timings: Mapping[str, float] | None = None


def read_request(path: str, body: bytes) -> Asked:
    """Parse a generation request.

    Raises ValueError, like an engine's 400, when the body is no JSON object, a field has the
    wrong type, or more is asked for than CONTEXT_TOKENS and MAX_CHOICES allow.
    """
    given = json.loads(body)
    if not isinstance(given, dict):
        raise ValueError("the body must be a JSON object")
    options = given.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ValueError("stream_options must be an object")
    limit = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return Asked(
        chat=path == CHAT_PATH,
        model=str(given.get("model", "")),
        stream=bool(given.get("stream")),
        include_usage=bool(options.get("include_usage")),
        output_tokens=_whole_number(given, limit, DEFAULT_OUTPUT_TOKENS, CONTEXT_TOKENS),
        prompt_tokens=max(1, len(body) // 4),
        choices=_whole_number(given, "n", 1, MAX_CHOICES),
    )


def _whole_number(given: Mapping[str, object], name: str, default: int, most: int) -> int:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or not 0 <= value <= most:
        raise ValueError(f"{name} must be a whole number from 0 to {most}")
    return value


def error_body(message: str, kind: str, code: str | None) -> dict[str, object]:
    """The OpenAI error envelope."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def models_body(names: tuple[str, ...]) -> dict[str, object]:
    """The answer of `/v1/models`."""
    data = [{"id": n, "object": "model", "created": CREATED, "owned_by": "fake"} for n in names]
    return {"object": "list", "data": data}


def chunk_text(index: int, chunk_bytes: int) -> str:
    """Text of the output token at ``index``: the same in a stream and in a plain reply."""
    return f"w{index} ".rjust(chunk_bytes, ".")


def shaped(body: Mapping[str, object], script: Script) -> dict[str, object]:
    """The body with the script's ``merge`` and ``drop`` applied."""
    whole = {**body, **script.merge}
    return {key: value for key, value in whole.items() if key not in script.drop}


def _usage(asked: Asked, output_tokens: int) -> dict[str, object]:
    output_tokens *= asked.choices
    usage: dict[str, object] = {
        "prompt_tokens": asked.prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": asked.prompt_tokens + output_tokens,
    }
    if asked.timings is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": asked.timings["cache_n"]}
    return usage


def _head(asked: Asked, request_number: int) -> dict[str, object]:
    kind = "chat.completion" if asked.chat else "text_completion"
    if asked.chat and asked.stream:
        kind += ".chunk"
    prefix = "chatcmpl" if asked.chat else "cmpl"
    return {
        "id": f"{prefix}-{request_number}",
        "object": kind,
        "created": CREATED,
        "model": asked.model,
    }


def plain_body(asked: Asked, script: Script, request_number: int) -> bytes:
    """A whole reply as JSON bytes."""
    count = asked.output_tokens if script.chunks is None else script.chunks
    text = "".join(chunk_text(i, script.chunk_bytes) for i in range(count))
    says: dict[str, object] = {"text": text}
    if asked.chat:
        says = {"message": {"role": "assistant", "content": text}}
    end = {"logprobs": None, "finish_reason": script.finish_reason}
    body = _head(asked, request_number)
    body["choices"] = [{"index": i, **says, **end} for i in range(asked.choices)]
    if script.usage:
        body["usage"] = _usage(asked, count)
    if asked.timings is not None:
        body["timings"] = {**asked.timings, "predicted_n": count}
    return json.dumps(shaped(body, script)).encode()


def _event(body: Mapping[str, object], script: Script) -> bytes:
    return b"data: " + json.dumps(shaped(body, script)).encode() + b"\n\n"


def stream_events(asked: Asked, script: Script, request_number: int) -> Iterator[bytes]:
    """The SSE events of a stream: one per output token, then usage when asked, then [DONE].

    The finish reason rides on the last token's event, so ``chunks`` tokens are ``chunks`` events.
    """
    head = _head(asked, request_number)
    count = asked.output_tokens if script.chunks is None else script.chunks
    for token in range(count):
        text = chunk_text(token, script.chunk_bytes)
        says: dict[str, object] = {"text": text}
        if asked.chat:
            says = {"delta": {"content": text}}
            if token == 0:
                says = {"delta": {"role": "assistant", "content": text}}
        end = {"finish_reason": script.finish_reason if token == count - 1 else None}
        choices = [{"index": i, **says, **end} for i in range(asked.choices)]
        event: dict[str, object] = {**head, "choices": choices}
        if asked.timings is not None and token == count - 1:
            event["timings"] = {**asked.timings, "predicted_n": count}
        yield _event(event, script)
    if asked.include_usage and script.usage:
        yield _event({**head, "choices": [], "usage": _usage(asked, count)}, script)
    if script.done:
        yield DONE_EVENT
