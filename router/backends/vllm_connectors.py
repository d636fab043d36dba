"""How vLLM's KV connectors hand over: what each leg is sent, and what the first leg's answer gives.

| connector | legs | P is told | D is told |
|---|---|---|---|
| nixl-pull | P, then D, which reads | to keep its KV | P's own object, verbatim |
| nixl-push | both at once; P writes | to keep its KV | where P is, and the request's id |
| example | P, then D | nothing | nothing: files in a shared folder, found by the prompt's hash |
| lmcache | P, then D | nothing | nothing: a shared pool, found by the prompt's hash |

Protocol: vllm/distributed/kv_transfer/kv_connector/v1 of vLLM 0.32 and 0.33. A `kv_transfer_params`
object of which a part is missing ends a vLLM engine, so it is sent whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from router.backends.vllm_claim import NONE, Claim, PrefillAnswer
from router.errors import HandoffFailed
from router.sections import KvTransfer

_KEEP_KV = {"do_remote_decode": True, "do_remote_prefill": False}
_LMCACHE_CHUNK_TOKENS = 256  # its default; smaller chunks divide it


class _Offer(msgspec.Struct):
    """What must be there of P's object, or D's engine dies of it or waits for ever."""

    do_remote_prefill: bool
    remote_block_ids: list[Any]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    pp_size: int = 1
    remote_num_tokens: int = 0


class Connector(Protocol):
    """One way to move KV. `at_once`: both legs are sent together."""

    name: str
    at_once: bool

    def prefill_fields(self) -> Mapping[str, object]:
        """Return what the first leg's body gets."""
        ...

    def before(self, request_id: str, now_s: float) -> Claim:
        """Return the claim of a connector whose legs go together."""
        ...

    def after(self, worker_url: str, request_id: str, answer: PrefillAnswer, now_s: float) -> Claim:
        """Return the claim that P's answer gives. Raises HandoffFailed when it cannot be used."""
        ...

    def decode_fields(self, claim: Claim) -> Mapping[str, object]:
        """Return what the second leg's body gets."""
        ...


class NixlPull:
    """NixlConnector: D reads P's blocks over UCX, while P keeps them for a lease."""

    name = "vllm-nixl-pull"
    at_once = False

    def __init__(self, kv: KvTransfer) -> None:
        self._lease_s = kv.lease_s

    def prefill_fields(self) -> Mapping[str, object]:
        """Ask P to keep its blocks."""
        return {"kv_transfer_params": _KEEP_KV}

    def before(self, request_id: str, now_s: float) -> Claim:
        """Never called: P's answer comes first."""
        raise AssertionError("nixl-pull has nothing to say before P answered")

    def after(self, worker_url: str, request_id: str, answer: PrefillAnswer, now_s: float) -> Claim:
        """Take P's object as it is, for as long as its lease lasts."""
        offer = _whole_offer(worker_url, answer)
        return Claim(
            request_id,
            promised_tokens=offer.remote_num_tokens or answer.prompt_tokens,
            stamp_s=now_s,
            lease_s=self._lease_s,
            kv=answer.kv_transfer_params,
        )

    def decode_fields(self, claim: Claim) -> Mapping[str, object]:
        """P's object."""
        return {"kv_transfer_params": claim.kv}


class NixlPush:
    """NixlPushConnector: D tells P which blocks it has kept free, and P writes into them.

    P's answer says where P really is, and how many ranks it has. What was assumed and is found
    wrong fails that hand-off, since D waits for a push that will not come; rank counts are right
    from the next one on.
    """

    name = "vllm-nixl-push"
    at_once = True

    def __init__(self, kv: KvTransfer) -> None:
        assert kv.engine_id is not None
        assert kv.side_channel is not None  # both required of this connector's settings
        self._lease_s = kv.lease_s
        self._place = (kv.engine_id, kv.side_channel.host, kv.side_channel.port)
        self._ranks = (1, 1)

    def prefill_fields(self) -> Mapping[str, object]:
        """Ask P to keep its blocks until they are written."""
        return {"kv_transfer_params": _KEEP_KV}

    def before(self, request_id: str, now_s: float) -> Claim:
        """Say where P is; the two requests meet by their id."""
        engine_id, host, port = self._place
        tp_size, pp_size = self._ranks
        fields = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": tp_size,
            "pp_size": pp_size,
            "remote_request_id": request_id,
        }
        return Claim(
            request_id,
            stamp_s=now_s,
            lease_s=self._lease_s,
            kv=msgspec.Raw(msgspec.json.encode(fields)),
        )

    def after(self, worker_url: str, request_id: str, answer: PrefillAnswer, now_s: float) -> Claim:
        """Check what `before` said, against what P says of itself."""
        offer = _whole_offer(worker_url, answer)
        engine_id, _, port = self._place  # its host may have several names
        if (offer.remote_engine_id, offer.remote_port) != (engine_id, port):
            raise HandoffFailed(
                worker_url,
                f"it is engine {offer.remote_engine_id} with side channel {offer.remote_port}, "
                f"while kv says {engine_id} and {port}",
                "correct engine_id and side_channel in the configuration",
            )
        ranks = (offer.tp_size, offer.pp_size)
        if ranks != self._ranks:
            self._ranks = ranks
            raise HandoffFailed(
                worker_url,
                f"it has {ranks[0]} tensor-parallel and {ranks[1]} pipeline ranks, which was not "
                "known yet",
                "nothing is to be done: the next hand-off counts on them",
            )
        return self.before(request_id, now_s)

    def decode_fields(self, claim: Claim) -> Mapping[str, object]:
        """Where P is."""
        return {"kv_transfer_params": claim.kv}


class ExampleFiles:
    """ExampleConnector: P writes one file a layer into a shared folder, D loads them.

    Whole blocks only. P saves (n-1)//B*B tokens of a prompt of n, and D looks for (n-2)//B*B, so
    with (n-1) % B == 0 it would find nothing: such a prompt is answered whole. Where decode is
    another engine's, the files are converted; see vllm_filler.

    An example it is, and not for traffic: with (n-1) % B == 0 a vLLM that finds the files of a
    prompt with the same beginning dies, as it counts on those and loads others.
    """

    name = "vllm-example"
    at_once = False

    def __init__(self, kv: KvTransfer, block_tokens: int) -> None:
        assert kv.folder is not None  # required of this connector's settings
        self._folder = kv.folder
        self.block_tokens = block_tokens

    def prefill_fields(self) -> Mapping[str, object]:
        """The prompt's ids are asked for: the files are found by them."""
        return {"return_token_ids": True}

    def before(self, request_id: str, now_s: float) -> Claim:
        """Never called: the files must be there first."""
        raise AssertionError("example has nothing to say before P answered")

    def after(self, worker_url: str, request_id: str, answer: PrefillAnswer, now_s: float) -> Claim:
        """Promise what D will find. Raises HandoffFailed for a prompt of which that is nothing."""
        length, block = answer.prompt_tokens, self.block_tokens
        found = max(0, length - 2) // block * block if block else 0
        if block and ((length - 1) % block == 0 or found == 0):
            raise HandoffFailed(
                worker_url,
                f"of a prompt of {length} tokens its files, in blocks of {block}, are not found",
                "it is answered whole",
            )
        return Claim(
            request_id,
            promised_tokens=found,
            folder=self._folder,
            token_ids=answer.token_ids(),
            block_tokens=block,
        )

    def decode_fields(self, claim: Claim) -> Mapping[str, object]:
        """Nothing: D looks for itself."""
        return {}


class LmcachePool:
    """LMCacheMPConnector: P stores whole chunks in a pool that D looks into."""

    name = "vllm-lmcache"
    at_once = False

    def prefill_fields(self) -> Mapping[str, object]:
        """Nothing: every prompt is stored."""
        return {}

    def before(self, request_id: str, now_s: float) -> Claim:
        """Never called: the chunks must be there first."""
        raise AssertionError("lmcache has nothing to say before P answered")

    def after(self, worker_url: str, request_id: str, answer: PrefillAnswer, now_s: float) -> Claim:
        """Promise the whole chunks; the pool may have dropped some since."""
        chunks = max(0, answer.prompt_tokens - 1) // _LMCACHE_CHUNK_TOKENS
        return Claim(request_id, promised_tokens=chunks * _LMCACHE_CHUNK_TOKENS)

    def decode_fields(self, claim: Claim) -> Mapping[str, object]:
        """Nothing: D looks for itself."""
        return {}


def connector_of(kv: KvTransfer, block_tokens: int) -> Connector:
    """Return the connector that a worker's settings name. `block_tokens` 0: it does not tell."""
    match kv.connector:
        case "nixl-pull":
            return NixlPull(kv)
        case "nixl-push":
            return NixlPush(kv)
        case "example":
            return ExampleFiles(kv, block_tokens)
        case "lmcache":
            return LmcachePool()


def _whole_offer(worker_url: str, answer: PrefillAnswer) -> _Offer:
    """Read P's object. Raises HandoffFailed unless all is there that D's engine relies on."""
    if bytes(answer.kv_transfer_params) == bytes(NONE):
        raise HandoffFailed(
            worker_url,
            "its prefill answer has no kv_transfer_params",
            "start it with --kv-transfer-config, or take `kv` out of its entry",
        )
    try:
        offer = msgspec.json.decode(answer.kv_transfer_params, type=_Offer)
    except msgspec.DecodeError as error:
        raise HandoffFailed(
            worker_url,
            f"its kv_transfer_params cannot be used ({error})",
            "update vLLM, or take `kv` out of its entry",
        ) from error
    blocks = [each for each in offer.remote_block_ids if each != []]
    if not (offer.do_remote_prefill and blocks):
        raise HandoffFailed(
            worker_url,
            "its kv_transfer_params offer no blocks",
            "read its log: it did not keep the prompt's KV",
        )
    return offer
