"""The text an engine answered with, out of the bytes of a chat or text completion."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    text: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_ANSWER = msgspec.json.Decoder(_Answer)


def spoken(body: bytes, *, stream: bool) -> str:
    """Return everything that was said, reasoning included, however it was cut into events.

    Raises ValueError for a body that is no such answer, or whose stream holds an error.
    """
    events: Iterable[bytes] = (body,)
    if stream:
        lines = (line for line in body.splitlines() if line.startswith(b"data:"))
        events = (data for line in lines if (data := line[5:].strip()) != b"[DONE]")
    return "".join(_text(event) for event in events)


def _text(event: bytes) -> str:
    try:
        choices = _ANSWER.decode(event).choices
    except msgspec.DecodeError as error:
        raise ValueError(f"not an answer of a model: {error}") from error
    parts: list[str | None] = []
    for choice in choices:
        parts.append(choice.text)
        for said in (choice.delta, choice.message):
            if said is not None:
                parts += (said.reasoning_content, said.reasoning, said.content)
    return "".join(part for part in parts if part)
