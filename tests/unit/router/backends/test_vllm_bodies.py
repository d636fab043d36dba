"""What vLLM's two legs are sent."""

import json

import pytest

from router.backends.vllm_body import cache_salt, own_body, prefill_body, why_not_split


def own(body: object, tenant: str = "", *, batch: bool = False) -> bytes:
    return own_body(json.dumps(body).encode(), tenant, {}, batch=batch)


def prefill(body: dict[str, object]) -> dict[str, object]:
    known: dict[str, object] = json.loads(prefill_body(json.dumps(body).encode(), {"x": 1}))
    return known


def test_a_body_with_nothing_to_change_keeps_its_bytes() -> None:
    body = b'{ "model":"m",  "prompt" : "\\u00e9", "temperature": 0.30000000000000004}'
    assert own_body(body, "", {}, batch=False) is body


def test_fields_of_ours_leave_the_others_as_they_were_written() -> None:
    body = b'{"n":1e-7,"prompt":"\\u00e9","kv_transfer_params":{"a":1}}'
    sent = own_body(body, "", {"kv_transfer_params": {"b": 2}}, batch=False)
    assert sent == b'{"n":1e-7,"prompt":"\\u00e9","kv_transfer_params":{"b":2}}'


@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "ec_transfer_params", "bootstrap_room", "id_slot"]
)
def test_handover_fields_of_a_client_are_taken_out(name: str) -> None:
    assert json.loads(own({"model": "m", name: {"do_remote_prefill": True}})) == {"model": "m"}


@pytest.mark.parametrize(
    "extra,kept",
    [
        ({"kv_transfer_params": "x", "a": [1, "b"]}, {"a": [1, "b"]}),
        ({"kv_transfer_params": 1}, {}),
        ({"a": 1}, {"a": 1}),
        (None, None),
        ("x", "x"),
        ([1], [1]),
    ],
)
def test_vllm_xargs_is_no_way_around_that(extra: object, kept: object) -> None:
    assert json.loads(own({"vllm_xargs": extra})) == {"vllm_xargs": kept}


def test_a_repeated_field_is_taken_out_each_time() -> None:
    body = b'{"kv_transfer_params":{"a":1},"model":"m","kv_transfer_params":{"b":1}}'
    assert own_body(body, "", {}, batch=False) == b'{"model":"m"}'


@pytest.mark.parametrize(
    "field,value",
    [
        ("stream_options", {"include_usage": True}),
        ("min_tokens", 5),
        ("n", 3),
        ("best_of", 3),
        ("logprobs", True),
        ("top_logprobs", 4),
    ],
)
def test_prefill_goes_without_what_would_hinder_it(field: str, value: object) -> None:
    asked = prefill({"model": "m", field: value, "stream": True, "max_tokens": 100})
    assert asked == {"model": "m", "stream": False, "max_tokens": 1, "x": 1}


def test_prefill_keeps_what_makes_the_prompt() -> None:
    makes = {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function"}],
        "tool_choice": "auto",
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
        "stop": ["x"],
        "temperature": 0.5,
    }
    assert prefill(makes) == {**makes, "stream": False, "max_tokens": 1, "x": 1}


@pytest.mark.parametrize("limit", [None, 0, 50])
def test_prefill_is_one_token_by_either_name(limit: int | None) -> None:
    asked = prefill({"max_completion_tokens": limit})
    assert (asked["max_completion_tokens"], asked["max_tokens"]) == (1, 1)
    assert "max_completion_tokens" not in prefill({"max_tokens": limit})


@pytest.mark.parametrize(
    "more,split",
    [
        ({}, True),
        ({"prompt_logprobs": None, "use_beam_search": False, "n": 1, "logprobs": 5}, True),
        ({"n": None, "best_of": 1}, True),
        ({"n": 2}, False),
        ({"best_of": 2}, False),
        ({"prompt_logprobs": 0}, False),
        ({"use_beam_search": True}, False),
        ({"truncate_prompt_tokens": 100}, False),
    ],
)
def test_what_is_split(more: dict[str, object], split: bool) -> None:
    assert (why_not_split(json.dumps({"model": "m", **more}).encode()) == "") is split


def test_salts_are_stable_and_apart() -> None:
    assert cache_salt("alice") == cache_salt("alice") != cache_salt("bob")
    assert cache_salt("alice", b'"x"') not in (cache_salt("alice"), cache_salt("bob", b'"x"'))
    assert cache_salt("ab", b'"c"') != cache_salt("a", b'b"c"')
    assert 1 <= len(cache_salt("a" * 500)) <= 1024


def test_both_legs_have_one_salt() -> None:
    body = own({"model": "m", "prompt": "p", "cache_salt": "mine", "priority": -1}, "alice")
    assert json.loads(body)["cache_salt"] == cache_salt("alice", b'"mine"')
    assert "priority" not in json.loads(body)
    assert json.loads(prefill_body(body, {}))["cache_salt"] == json.loads(body)["cache_salt"]


def test_priorities_are_for_batch_only() -> None:
    assert "priority" not in json.loads(own({"model": "m"}))
    assert json.loads(own({"model": "m"}, "alice", batch=True))["priority"] == 10
    assert json.loads(own({"model": "m", "priority": 3}))["priority"] == 3
