"""What a client's body says about its slot, whatever a client writes there."""

from __future__ import annotations

import json

import pytest

from router.backends.courier_client import tokens_digest
from router.backends.llama_prompt import CHAT, COMPLETIONS, LlamaPrompt
from workers.courier import slot_head


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


@pytest.mark.parametrize(
    "fields,choices",
    [
        ({}, 1),
        ({"n": 3}, 3),
        ({"n": None}, 1),
        ({"n_cmpl": 2}, 2),
        ({"n": 2, "n_cmpl": 4}, 4),
        ({"n": "3"}, 1),
        ({"n": [3]}, 1),
        ({"n": 1.5}, 1),
        ({"n": -2}, 1),
    ],
)
def test_number_of_answers(fields: dict[str, object], choices: int) -> None:
    assert max(1, LlamaPrompt(COMPLETIONS, body(prompt="a", **fields)).choices) == choices


def test_the_prompt_is_as_the_client_wrote_it() -> None:
    raw = b'{"messages" : [ {"role":"user", "content":"\\u00e9"} ], "prompt": "x", "lora": [1]}'
    chat = LlamaPrompt(CHAT, raw)
    assert chat.raw == b'[ {"role":"user", "content":"\\u00e9"} ]'
    assert chat.lora is not None
    assert bytes(chat.lora) == b"[1]"
    assert LlamaPrompt(COMPLETIONS, raw).raw == b'"x"'


def test_a_body_without_a_prompt() -> None:
    empty = LlamaPrompt(b"/v1/responses", body(input="a"))
    assert (empty.raw, empty.choices, empty.lora) == (b"", 1, None)


@pytest.mark.parametrize("ids", [[], [0], [1, 2, 3], [2**31 - 1, 5]])
def test_router_and_courier_agree_on_the_digest(ids: list[int]) -> None:
    assert tokens_digest(ids) == slot_head.tokens_digest(ids)
