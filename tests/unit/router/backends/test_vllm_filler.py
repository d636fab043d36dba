"""The filler behind a prompt that vLLM prefills for another engine."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backends.vllm_filler import (
    given_ids,
    ids_body,
    require_plain,
    tokenize_body,
    with_filler,
)

PROMPTS = st.lists(st.integers(0, 50_000), min_size=2, max_size=300)


@given(PROMPTS, st.sampled_from((2, 3, 16, 32, 128)))
def test_what_is_stored_suffices(ids: list[int], block: int) -> None:
    sent = with_filler(ids, block, 0, "a")
    stored = (len(sent) - 1) // block * block
    assert sent[: len(ids) + 1] == [*ids, ids[-1]]
    assert len(ids) + 1 <= stored - block, "the last block may not be computed"
    assert len(ids) + 1 + 16 <= stored, "the mark is in the name of the files"
    assert stored < len(ids) + 1 + max(16, block) + block, "no more than it must be"
    assert (len(sent) - 2) // block * block == stored, "looked for where it is stored"
    assert all(0 <= each < 256 for each in sent[len(ids) + 1 :])


@given(PROMPTS)
def test_no_two_hand_offs_share_files(ids: list[int]) -> None:
    ones, others = (with_filler(ids, 32, 0, mark) for mark in ("r.1", "r.2"))
    assert len(ones) == len(others)
    assert ones[:-1] != others[:-1]
    assert ones == with_filler(ids, 32, 0, "r.1")


@pytest.mark.parametrize(
    "length,block,context,why",
    [
        (1, 32, 0, "a prompt of 1 tokens leaves nothing"),
        (0, 32, 0, "a prompt of 0 tokens"),
        (9, 0, 0, "blocks of 0 tokens"),
        (100, 32, 162, "100 tokens and filler, 162, do not fit into 162"),
    ],
)
def test_what_cannot_be_lengthened(length: int, block: int, context: int, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        with_filler(list(range(length)), block, context, "a")
    assert len(with_filler(list(range(100)), 32, 163, "a")) == 162


def chat(*parts: dict[str, Any]) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()


def test_only_text_is_told_by_ids() -> None:
    require_plain(chat({"type": "text", "text": "what is an image_url?"}))
    require_plain(b'{"prompt": "a", "prompt_embeds": null}')
    for media in ("image_url", "input_audio", "video_url"):
        with pytest.raises(ValueError, match="images and audio"):
            require_plain(chat({"type": media}))
    with pytest.raises(ValueError, match="prompt_embeds"):
        require_plain(b'{"prompt": "a", "prompt_embeds": "AAAA"}')


@pytest.mark.parametrize(
    "prompt,ids",
    [
        ([1, 2], [1, 2]), ([], []), ("a", None), (["a"], None), ([1, "a"], None), (None, None),
        (7, None), ([[1]], None),
    ],
)  # fmt: skip
def test_ids_that_the_client_has_given(prompt: object, ids: list[int] | None) -> None:
    assert given_ids(json.dumps({"prompt": prompt}).encode()) == ids


def test_the_bodies_of_the_two_requests() -> None:
    known = {"model": "m", "cache_salt": "s", "priority": 3, "temperature": 0.5, "id_slot": 1}
    body = json.dumps({**known, "prompt": ["a"], "n": 2}).encode()
    asked = {name: value for name, value in known.items() if name != "id_slot"}
    assert json.loads(tokenize_body(body)) == {**asked, "prompt": "a", "n": 2}
    assert json.loads(ids_body(body, [1, 2])) == {
        "model": "m", "cache_salt": "s", "priority": 3, "prompt": [1, 2]
    }  # fmt: skip
    messages = chat({"type": "text", "text": "a"})
    assert tokenize_body(messages) == messages
    assert given_ids(messages) is None
    odd = b'{"prompt": ["a", "b"]}'
    assert tokenize_body(odd) == odd, "the engine will say what is wrong with it"
