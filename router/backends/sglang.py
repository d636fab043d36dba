"""SGLang: prefill and decode servers that get a request at the same time.

Both get the client's body with three fields more: where the prefill server's bootstrap server is,
and a room, in which the two meet. The prefill server stops after one token by itself and pushes KV
into the decode server, whose answer begins with that token. Whichever of the two fails, the other
would wait for minutes, so its connection is closed, which aborts it.

Protocol: sglang 0.5, python/sglang/srt/disaggregation and entrypoints/http_server.py.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator
from dataclasses import replace

from router.backends.base import BackendCall, EngineRefused, PrefillDone, Target, Unusable
from router.backends.body import with_fields
from router.backends.first_event import error_in, opened
from router.backends.probing import PROBE_DEADLINES, get_json
from router.backends.prometheus_text import Series, read_series
from router.backends.sglang_facts import ServerFacts, read_facts
from router.errors import UpstreamError
from router.event_stream import is_event_stream
from router.upstream import Upstream, UpstreamResponse
from router.usage import TokenCounts, UsageMeter
from router.wire import Deadlines
from splitserve.messages import Failure, Handoff, Role, WorkerSnapshot

FAKE_PEER = "2.2.2.2"
"""As `bootstrap_host`: a peer built into SGLang. A leg with it needs no partner."""
_RANKS = ("data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank")
_ROOM_BITS = 63
_REPLY_LIMIT_BYTES = 1 << 20
_LOST_KV = (b"transfer failed", b"handshake failed", b"bootstrap failed", b"KVTransferError")
_RUNNING, _USED = "sglang:num_running_reqs", "sglang:token_usage"
_WAITING = (
    "sglang:num_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)


class SglangBackend:
    """An SGLang server in the mode in which it was started."""

    engine = "sglang"

    def __init__(self, target: Target, upstream: Upstream, deadlines: Deadlines) -> None:
        self.worker_id = target.worker_id
        self.origin = target.origin
        self._upstream = upstream
        self._role = target.role
        self._headers = target.options.headers
        self._deadlines = deadlines
        self._facts = ServerFacts()

    async def probe(self) -> WorkerSnapshot:
        """Read what the server was started with, and let it serve one request against no peer.

        Raises ValueError when it is no SGLang server, and Unusable when it fails that request or
        is not in the mode that its role asks for.
        """
        facts = self._facts = await read_facts(self._upstream, self.origin, self._headers)
        role = self._role_of(facts)
        if facts.splits:
            await self._check_alone(facts)
        return WorkerSnapshot(
            worker_id=self.worker_id,
            role=role,
            engine=self.engine,
            models=(facts.model,),
            connector=f"sglang-{facts.transfer_backend}" if facts.splits else "",
            pairing_key=facts.pairing_key if facts.splits else "",
            max_running=facts.max_running,
            kv_capacity_tokens=facts.kv_capacity_tokens,
            max_context_tokens=facts.context_tokens,
            hands_over_logits=facts.splits,
            splits_only=facts.splits,
            notes=facts.notes,
        )

    def _role_of(self, facts: ServerFacts) -> Role:
        if not facts.splits:
            return Role.AGGREGATED if self._role is Role.AUTO else self._role
        own = Role(facts.mode)
        if self._role not in (Role.AUTO, own):
            raise Unusable(
                f"it runs with --disaggregation-mode {facts.mode}, and its role is {self._role}; "
                "correct one of the two"
            )
        return own

    async def _check_alone(self, facts: ServerFacts) -> None:
        """One token against the fake peer. Raises Unusable when that does not work."""
        body = {
            "input_ids": [1, 2, 3, 4],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            **_meeting(FAKE_PEER, facts.bootstrap_port, 0),
        }
        async with await self._upstream.request(
            self.origin,
            b"POST",
            b"/generate",
            headers=(*self._headers, (b"content-type", b"application/json")),
            body=json.dumps(body).encode(),
            deadlines=PROBE_DEADLINES,
        ) as response:
            answer = await response.read(_REPLY_LIMIT_BYTES)
            if response.status != 200:
                told = " ".join(answer[:200].decode("utf-8", "replace").split())
                raise Unusable(f"alone, against no peer, it answers {response.status}: {told}")

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Read gauges, of a server started with --enable-metrics; else only that it lives."""
        status, text = await get_json(self._upstream, self.origin, b"/metrics", self._headers)
        if status != 200:
            status, _ = await get_json(self._upstream, self.origin, b"/health", self._headers)
            if status != 200:
                raise ValueError(f"GET /health answered {status}")
            return known
        found = read_series(text, (_RUNNING, _USED, *_WAITING))
        used = max(_of_ranks(found, _USED), default=0.0)
        return replace(
            known,
            running=int(sum(_of_ranks(found, _RUNNING))),
            waiting=int(sum(sum(_of_ranks(found, name)) for name in _WAITING)),
            kv_used_tokens=int(min(1.0, used) * known.kv_capacity_tokens),
        )

    async def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        """Name a room at once, so that both legs are sent together; then drain this one's answer.

        Its end means that the KV is across. The decode server reaches the room by the host under
        which the configuration knows this one.
        """
        room = secrets.randbits(_ROOM_BITS)
        host = self.origin.host
        meeting = _meeting(f"[{host}]" if ":" in host else host, self._facts.bootstrap_port, room)
        connector = f"sglang-{self._facts.transfer_backend}"
        yield Handoff(str(room), self.worker_id, connector, json.dumps(meeting))
        now_s = asyncio.get_running_loop().time
        sent_s = now_s()
        async with await self._send(call, meeting) as response:
            counts = await self._drained(response)
        yield PrefillDone(
            counts.prompt_tokens or 0, counts.cached_tokens or 0, max(now_s() - sent_s, 1e-9)
        )

    async def _drained(self, response: UpstreamResponse) -> TokenCounts:
        """Read a prefill answer to its end. Raises EngineRefused for an error, in a stream too."""
        stream = is_event_stream(response.headers)
        body = await response.read(_REPLY_LIMIT_BYTES)
        if response.status != 200:
            raise EngineRefused(response.status, response.headers, body)
        for event in body.split(b"\n\n") if stream else ():
            error = error_in(event)
            if error is not None:
                raise EngineRefused(error[0], response.headers, error[1])
        meter = UsageMeter(stream=stream)
        meter.see(body)
        return meter.counts()

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        """Send the client's request; with a hand-off, the fields of its room are added."""
        if handoff is None:
            self._require("null")
            return await self._post(call, call.body)
        self._require("decode")
        return await opened(await self._send(call, json.loads(handoff.attributes)))

    def _require(self, mode: str) -> None:
        """Roles may be changed by hand, a server's mode only by a restart. Raises UpstreamError."""
        if self._facts.mode != mode:
            raise UpstreamError(
                self.origin.url,
                f"it runs with --disaggregation-mode {self._facts.mode}",
                f"give it back the role {self._facts.mode}",
            )

    async def _send(self, call: BackendCall, meeting: dict[str, object]) -> UpstreamResponse:
        """Send one of two legs. Which ranks meet follows from the room, not from the client."""
        return await self._post(call, with_fields(call.body, meeting, drop=_RANKS))

    async def _post(self, call: BackendCall, body: bytes) -> UpstreamResponse:
        return await self._upstream.request(
            self.origin,
            b"POST",
            call.path,
            headers=(*call.headers, *self._headers),
            body=body,
            deadlines=self._deadlines,
        )

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        """Nothing is left to release: closing the prefill leg's connection aborts it."""

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        """Nothing, ever: a decode server computes no prompt, it fails without the KV."""
        return 0

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        """Tell a transfer that failed from other errors by the engine's words for it."""
        if status < 500 and status != 429:
            return None
        return Failure.HANDOFF if any(words in body for words in _LOST_KV) else Failure.REFUSED


def _meeting(host: str, port: int, room: int) -> dict[str, object]:
    return {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}


def _of_ranks(series: Series, name: str) -> list[float]:
    """One value for each data-parallel rank; of those of its tensor-parallel ranks the largest."""
    found: dict[str, float] = {}
    for sample in series.of(name):
        rank = sample.labels.get("dp_rank", "")
        found[rank] = max(found.get(rank, 0.0), sample.value)
    return list(found.values())
