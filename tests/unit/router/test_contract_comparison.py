"""Two streams are the same answer when they add up to the same, however they are cut."""

from __future__ import annotations

import json

from router.testing.contract import added_up


def stream(*texts: str, index: int = 0, **last: object) -> bytes:
    chunks = [{"id": 0, "choices": [{"index": index, "delta": {"role": "assistant"}}]}]
    chunks += [
        {"id": 0, "choices": [{"index": index, "delta": {"content": text}, "logprobs": [text]}]}
        for text in texts
    ]
    chunks.append({"id": 0, "choices": [{"index": index, "finish_reason": "stop"}], **last})
    events = [b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks]
    return b"".join(events) + b"data: [DONE]\n\n"


def test_texts_and_lists_are_joined() -> None:
    whole = added_up(stream("one ", "two"))
    (choice,) = whole["choices"].values()
    assert choice["delta"] == {"role": "assistant", "content": "one two"}
    assert choice["logprobs"] == ["one ", "two"]
    assert choice["finish_reason"] == "stop"


def test_the_same_text_in_other_pieces_is_the_same_but_for_its_lists() -> None:
    one, other = added_up(stream("ab", "c")), added_up(stream("a", "bc"))
    assert one["choices"]["0"].pop("logprobs") != other["choices"]["0"].pop("logprobs")
    assert one == other


def test_another_text_choice_or_field_is_another_answer() -> None:
    known = added_up(stream("one"))
    assert added_up(stream("two")) != known
    assert added_up(stream("one", index=1)) != known
    assert added_up(stream("one", usage={"completion_tokens": 1})) != known
    assert added_up(stream()) != known
