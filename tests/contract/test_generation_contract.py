"""What a client may ask of a generation: whatever it is, the engine's own answer comes back.

Every test of this file holds for real engines too: tests/engines runs it against them.
"""

from __future__ import annotations

import pytest

from router.testing.contract import (
    CHAT,
    COMPLETIONS,
    Served,
    answers,
    assert_same,
    both,
    chat,
    completion,
    events,
)

BOTH_WAYS = pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
TALK = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]
SAMPLING: dict[str, object] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "seed": 11,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.1,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
# What engines know and do not know: each says its own word, and the router none.
FIELDS: dict[str, dict[str, object]] = {
    "tools": {"tools": [TOOL], "tool_choice": "none"},
    "json object": {"response_format": {"type": "json_object"}},
    "json schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
    },
    "logit bias": {"logit_bias": {"29": -100}},
    "unknown field": {"a_field_of_tomorrow": {"deep": [1.50, None, "é"]}},
    "user and metadata": {"user": "somebody", "metadata": {"trace": "1"}},
    "nulls": {"stop": None, "seed": None, "n": None, "stream_options": None},
    "wrong type": {"temperature": "hot"},
    "out of range": {"top_p": 7},
    "unknown role": {"messages": [{"role": "stranger", "content": "Hello"}]},
    "odd content": {"messages": [{"role": "user", "content": 5}]},
}


@BOTH_WAYS
async def test_a_talk_of_several_turns(served: Served, stream: bool) -> None:
    routed, direct = await both(served, CHAT, chat(served, messages=TALK, stream=stream))
    assert routed.status_code == 200
    assert_same(served, routed, direct)


@BOTH_WAYS
async def test_text_beyond_ascii(served: Served, stream: bool) -> None:
    messages = [{"role": "user", "content": "Grüße, 世界 \U0001f999! Say ‘naïve’.\n\t\u0001"}]
    routed, direct = await both(served, CHAT, chat(served, messages=messages, stream=stream))
    assert routed.status_code == 200
    assert_same(served, routed, direct)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("count", [1, 7])
async def test_the_limit_of_tokens(served: Served, field: str, count: int) -> None:
    body = chat(served)
    del body["max_tokens"]
    routed, direct = await both(served, CHAT, body | {field: count})
    assert_same(served, routed, direct)
    assert routed.json()["usage"]["completion_tokens"] == count
    assert routed.json()["choices"][0]["finish_reason"] == "length"


@BOTH_WAYS
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_cut_by_its_limit_says_so(served: Served, path: str, stream: bool) -> None:
    body = chat(served, stream=stream) if path == CHAT else completion(served, stream=stream)
    routed, direct = await both(served, path, body)
    assert_same(served, routed, direct)
    reasons = [c["finish_reason"] for answer in answers(routed) for c in answer["choices"]]
    assert [reason for reason in reasons if reason] == ["length"]


@BOTH_WAYS
async def test_sampling_with_a_seed(served: Served, stream: bool) -> None:
    body = chat(served, max_tokens=8, stream=stream) | SAMPLING
    routed, direct = await both(served, CHAT, body)
    assert routed.status_code == 200
    assert_same(served, routed, direct)
    again, _ = await both(served, CHAT, body)
    assert_same(served, again, routed)


@BOTH_WAYS
async def test_log_probabilities_of_a_chat(served: Served, stream: bool) -> None:
    body = chat(served, logprobs=True, top_logprobs=2, stream=stream)
    assert_same(served, *await both(served, CHAT, body))


@BOTH_WAYS
async def test_log_probabilities_of_a_completion(served: Served, stream: bool) -> None:
    assert_same(served, *await both(served, COMPLETIONS, completion(served, logprobs=2)))


async def test_several_prompts_in_one_body(served: Served) -> None:
    body = completion(served, prompt=["Once upon a time", "The sea is"])
    assert_same(served, *await both(served, COMPLETIONS, body))


async def test_a_prompt_of_token_ids(served: Served) -> None:
    body = completion(served, prompt=[1, 504, 260, 1038, 28])
    assert_same(served, *await both(served, COMPLETIONS, body))


async def test_echo(served: Served) -> None:
    assert_same(served, *await both(served, COMPLETIONS, completion(served, echo=True)))


@pytest.mark.parametrize("name", FIELDS)
async def test_a_field_is_the_engines_matter(served: Served, name: str) -> None:
    assert_same(served, *await both(served, CHAT, chat(served) | FIELDS[name]))


async def test_fields_in_any_order_and_spacing(served: Served) -> None:
    body = (
        b'{"max_tokens" : 3,\n\t"messages": [ {"content":"Say \\u0068i.", "role":"user"} ] ,'
        b' "temperature":0.0, "stream":true , "model":"%b" }'
    ) % served.model.encode()
    routed, direct = await both(served, CHAT, body)
    assert_same(served, routed, direct)
    assert events(routed)
