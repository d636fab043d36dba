"""What vLLM's connectors make of a prefill answer."""

import json
from typing import Any

import msgspec
import pytest

from router.backends.vllm_claim import Claim, PrefillAnswer
from router.backends.vllm_connectors import Connector, connector_of
from router.errors import HandoffFailed
from router.sections import KvTransfer

URL = "http://p:8000"
OFFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "e",
    "remote_request_id": "cmpl-r-0-1234abcd",
    "remote_host": "p",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 70,
    "remote_blocks_expiry_time": None,
    "a_field_of_the_future": {"x": [1.50, 1e-7]},
    "remote_prefill_cached_tokens": 16,
}


def connector(name: str, block_tokens: int = 16, **more: object) -> Connector:
    return connector_of(KvTransfer.model_validate({"connector": name, **more}), block_tokens)


def push() -> Connector:
    return connector("nixl-push", engine_id="e", side_channel="p:5600")


def example(block_tokens: int = 16) -> Connector:
    return connector("example", block_tokens, folder="/shared")


def answer(tokens: int = 70, **fields: object) -> PrefillAnswer:
    usage = {"prompt_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 32}}
    body = {"usage": usage, "choices": [{"prompt_token_ids": [7, 8]}], **fields}
    return msgspec.json.decode(json.dumps(body).encode(), type=PrefillAnswer)


def test_pull_passes_the_object_on_as_it_was_written() -> None:
    pull = connector("nixl-pull", lease_s=60.0)
    raw = (
        b'{"usage":{"prompt_tokens":70},"kv_transfer_params": ' + json.dumps(OFFER).encode() + b"}"
    )
    given = msgspec.json.decode(raw, type=PrefillAnswer)
    sent = msgspec.json.encode(pull.after(URL, "r", given, 100.0))
    claim = msgspec.json.decode(sent, type=Claim)
    assert bytes(claim.kv) == json.dumps(OFFER).encode()
    assert pull.decode_fields(claim) == {"kv_transfer_params": claim.kv}
    assert (claim.request_id, claim.promised_tokens, claim.engine_id) == ("r", 70, "e")
    assert (claim.stamp_s, claim.lease_s, claim.send_by_s) == (100.0, 60.0, 150.0)
    assert given.cached_tokens == 16


@pytest.mark.parametrize(
    "broken",
    [
        None,
        {},
        *({**OFFER, name: None} for name in list(OFFER)[2:8]),
        {**OFFER, "remote_block_ids": []},
        {**OFFER, "remote_block_ids": [[], []]},
        {**OFFER, "do_remote_prefill": False},
        {**OFFER, "remote_port": "5600"},
    ],
)
@pytest.mark.parametrize("name", ["pull", "push"])
def test_an_object_of_which_a_part_is_missing_is_refused(broken: Any, name: str) -> None:
    used = connector("nixl-pull") if name == "pull" else push()
    with pytest.raises(HandoffFailed):
        used.after(URL, "r", answer(kv_transfer_params=broken), 0.0)


def test_block_ids_may_be_in_groups_or_not() -> None:
    for blocks in ([1, 2], [[1, 2]], [[], [5]]):
        given = answer(kv_transfer_params={**OFFER, "remote_block_ids": blocks})
        assert connector("nixl-pull").after(URL, "r", given, 0.0).kv


@pytest.mark.parametrize("lease_s,last_s", [(30.0, 20.0), (480.0, 470.0), (12.0, 8.0), (3.0, 2.0)])
def test_a_claim_is_to_be_sent_well_before_its_lease_ends(lease_s: float, last_s: float) -> None:
    claim = Claim("r", stamp_s=0.0, lease_s=lease_s)
    assert claim.send_by_s == pytest.approx(last_s)


def test_push_says_where_the_prefill_worker_is() -> None:
    claim = push().before("r", 5.0)
    assert json.loads(bytes(claim.kv)) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_host": "p",
        "remote_port": 5600,
        "tp_size": 1,
        "pp_size": 1,
        "remote_request_id": "r",
    }
    assert claim.promised_tokens is None
    assert push().prefill_fields() == connector("nixl-pull").prefill_fields()


@pytest.mark.parametrize("wrong", [{"remote_engine_id": "f"}, {"remote_port": 1}])
def test_push_to_somebody_else_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(HandoffFailed, match="engine_id and side_channel"):
        push().after(URL, "r", answer(kv_transfer_params={**OFFER, **wrong}), 0.0)


def test_push_takes_ranks_from_the_answer() -> None:
    used, given = push(), answer(kv_transfer_params={**OFFER, "tp_size": 4, "pp_size": 2})
    with pytest.raises(HandoffFailed, match="4 tensor-parallel and 2 pipeline ranks"):
        used.after(URL, "r", given, 0.0)
    used.after(URL, "r", given, 0.0)
    fields = json.loads(bytes(used.before("r", 0.0).kv))
    assert (fields["tp_size"], fields["pp_size"]) == (4, 2)


@pytest.mark.parametrize(
    "tokens,found",
    [(1, None), (16, None), (17, None), (18, 16), (32, 16), (33, None), (34, 32), (65, None)],
)
def test_files_promise_only_what_is_looked_for(tokens: int, found: int | None) -> None:
    if found is None:
        with pytest.raises(HandoffFailed, match=f"prompt of {tokens} tokens .* are not found"):
            example().after(URL, "r", answer(tokens), 0.0)
    else:
        assert example().after(URL, "r", answer(tokens), 0.0).promised_tokens == found


def test_files_name_the_prompt() -> None:
    used = example()
    completion = used.after(URL, "r", answer(40), 0.0)
    chat = used.after(URL, "r", answer(40, prompt_token_ids=[1, 2, 3]), 0.0)
    assert (completion.token_ids, chat.token_ids) == ([7, 8], [1, 2, 3])
    told = json.loads(msgspec.json.encode(chat))
    assert (told["folder"], told["token_ids"], told["block_tokens"]) == ("/shared", [1, 2, 3], 16)
    assert used.decode_fields(chat) == {}
    assert chat.lease_s == 0.0


def test_files_of_an_engine_that_tells_no_block_size_promise_nothing() -> None:
    claim = example(0).after(URL, "r", answer(40), 0.0)
    assert claim.promised_tokens == 0


@pytest.mark.parametrize("tokens,chunks", [(0, 0), (256, 0), (257, 1), (1000, 3)])
def test_a_pool_promises_whole_chunks_and_no_fields(tokens: int, chunks: int) -> None:
    used = connector("lmcache")
    claim = used.after(URL, "r", answer(tokens), 0.0)
    assert claim.promised_tokens == chunks * 256
    assert used.prefill_fields() == used.decode_fields(claim) == {}


def test_cached_tokens_come_from_usage_where_no_object_tells() -> None:
    assert answer().cached_tokens == 32
    assert msgspec.json.decode(b"{}", type=PrefillAnswer).cached_tokens == 0
