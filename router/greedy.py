"""Which requests have one right answer, so that two ways of computing it can be compared."""

from __future__ import annotations

import msgspec

from router.backends.base import BackendCall

_ROUTES = (b"/v1/chat/completions", b"/v1/completions")
_LONGEST_BODY_BYTES = 64 * 1024  # it is computed again, on a machine that may be slow
_MOST_TOKENS = 512


class _Wish(msgspec.Struct):
    temperature: float | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b'""')
    tools: msgspec.Raw = msgspec.Raw(b"null")
    functions: msgspec.Raw = msgspec.Raw(b"null")
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    top_logprobs: msgspec.Raw = msgspec.Raw(b"null")
    prompt_logprobs: msgspec.Raw = msgspec.Raw(b"null")
    echo: bool | None = None


_WISH = msgspec.json.Decoder(_Wish)
_ABSENT = (b"null", b"false")


def is_greedy(call: BackendCall) -> bool:
    """True for a short request for one greedy answer in plain text.

    Greedy only where temperature is 0 in so many words: engines have defaults of their own.
    """
    if call.path not in _ROUTES or len(call.body) > _LONGEST_BODY_BYTES:
        return False
    try:
        wish = _WISH.decode(call.body)
    except msgspec.DecodeError:
        return False
    extras = wish.tools, wish.functions, wish.logprobs, wish.top_logprobs, wish.prompt_logprobs
    limit = wish.max_tokens if wish.max_completion_tokens is None else wish.max_completion_tokens
    return (
        wish.temperature == 0
        and wish.n in (None, 1)
        and wish.best_of in (None, 1)
        and not wish.echo
        and all(bytes(extra) in _ABSENT for extra in extras)
        and bytes(wish.prompt).startswith(b'"')
        and (limit is None or 0 < limit <= _MOST_TOKENS)
    )
