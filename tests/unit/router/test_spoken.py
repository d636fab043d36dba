"""What was said is the same text however it was cut into events."""

from __future__ import annotations

import json

import pytest

from router.spoken import spoken


def events(*deltas: dict[str, object]) -> bytes:
    bodies = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    lines = [f"data: {json.dumps(body)}\n\n" for body in bodies]
    usage = json.dumps({"choices": [], "usage": {"completion_tokens": 3}})
    return "".join([": ping\n\n", *lines, f"data: {usage}\n\n", "data: [DONE]\n\n"]).encode()


def test_deltas_are_joined() -> None:
    fine = events({"role": "assistant", "content": ""}, {"content": "a "}, {"content": "b\n"}, {})
    coarse = events({"role": "assistant", "content": "a b\n"})
    assert spoken(fine, stream=True) == spoken(coarse, stream=True) == "a b\n"


def test_reasoning_is_part_of_it() -> None:
    body = events({"reasoning_content": "hm "}, {"reasoning": "so "}, {"content": "yes"})
    assert spoken(body, stream=True) == "hm so yes"


def test_plain_answers() -> None:
    message = {"role": "assistant", "content": "yes", "reasoning_content": "hm "}
    chat = {"choices": [{"message": message}], "usage": None}
    assert spoken(json.dumps(chat).encode(), stream=False) == "hm yes"
    text = {"choices": [{"text": "yes"}]}
    assert spoken(json.dumps(text).encode(), stream=False) == "yes"


@pytest.mark.parametrize(
    "body,stream",
    [
        (b"", False),
        (b"[]", False),
        (b'{"error": {"message": "no"}}', False),
        (b'data: {"error": {"message": "no"}}\n\n', True),
        (b'data: {"choices": [\n\n', True),
    ],
)
def test_what_is_no_answer(body: bytes, stream: bool) -> None:
    with pytest.raises(ValueError, match="not an answer"):
        spoken(body, stream=stream)
