"""Only a short request for one greedy answer in plain text can be compared."""

from __future__ import annotations

import json

import pytest

from router.backends.base import BackendCall
from router.greedy import is_greedy

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TEXT = {"model": "m", "prompt": "hi", "temperature": 0.0}


def call(body: dict[str, object], path: bytes = b"/v1/chat/completions") -> BackendCall:
    return BackendCall(path, json.dumps(body).encode())


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"stream": True},
        {"n": 1, "max_tokens": 512, "tools": None, "logprobs": False},
        {"max_completion_tokens": 16, "max_tokens": 9999},
        {"stop": ["a"], "seed": 3, "response_format": {"type": "json_object"}},
    ],
)
def test_what_is_compared(more: dict[str, object]) -> None:
    assert is_greedy(call({**CHAT, **more}))
    assert is_greedy(call({**TEXT, **more}, b"/v1/completions"))


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.1},
        {"temperature": None},
        {"n": 2},
        {"best_of": 2},
        {"tools": [{"type": "function"}]},
        {"functions": []},
        {"logprobs": True},
        {"top_logprobs": 3},
        {"prompt_logprobs": 1},
        {"echo": True},
        {"max_tokens": 513},
        {"max_tokens": 0},
        {"max_completion_tokens": 9999, "max_tokens": 5},
        {"temperature": "0"},
    ],
)
def test_what_is_not(more: dict[str, object]) -> None:
    assert not is_greedy(call({**CHAT, **more}))


def test_greedy_only_in_so_many_words() -> None:
    assert not is_greedy(call({key: CHAT[key] for key in ("model", "messages")}))


@pytest.mark.parametrize("prompt", [["a"], ["a", "b"], [1, 2], [[1], [2]]])
def test_one_prompt_in_text(prompt: object) -> None:
    assert not is_greedy(call({**TEXT, "prompt": prompt}, b"/v1/completions"))


def test_long_prompts_and_other_routes_are_left_alone() -> None:
    assert not is_greedy(call({**CHAT, "messages": "x" * 65_536}))
    assert not is_greedy(call(CHAT, b"/v1/responses"))
    assert not is_greedy(BackendCall(b"/v1/completions", b"no json"))
