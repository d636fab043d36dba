"""llama.cpp's `llama-server`: hand-offs are slot files, moved by a courier beside each server.

The prefill worker evaluates all of a prompt but its last token, which no engine can do without
and recurrent models cannot take back, and saves its slot. The decode worker's courier fetches
the file and checks it, its server restores it into a slot that the router has on lease, and the
client's own request goes to that slot. A worker without a courier serves whole requests only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import msgspec

from router.backends.base import BackendCall, PrefillDone, Target
from router.backends.body import with_fields
from router.backends.llama_handover import CONNECTOR, Handover, promised_tokens, spent_s
from router.backends.llama_prompt import CHAT, COMPLETIONS, LlamaPrompt, RunsWhole
from router.backends.llama_slots import Lease
from router.backends.llama_standing import Standing
from router.errors import HandoffFailed
from router.upstream import Upstream, UpstreamResponse
from router.usage import TokenCounts
from router.wire import Deadlines
from splitserve.messages import Failure, Handoff, WorkerSnapshot

_ONE_SLOT = (CHAT, COMPLETIONS, b"/v1/responses")
_NO_SLOT = (b"/v1/messages/count_tokens", b"/v1/chat/completions/input_tokens")


class LlamaCppBackend:
    """A llama-server in any role. It must have no other clients once it takes hand-offs."""

    engine = "llama.cpp"

    def __init__(self, target: Target, upstream: Upstream, deadlines: Deadlines) -> None:
        self.worker_id = target.worker_id
        self.origin = target.origin
        self._headers = target.options.headers
        self._upstream = upstream
        self._deadlines = deadlines
        self._standing = Standing(target, upstream, deadlines)

    @property
    def why_whole(self) -> str:
        """Why it takes no part in hand-offs at the moment; "" when it does."""
        return self._standing.why_whole

    async def probe(self) -> WorkerSnapshot:
        """Ask what it is, and try a hand-off where it has a courier. Raises ValueError."""
        return await self._standing.probe(self.engine)

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Ask how busy it is. Raises WorkerRestarted when another process has taken its place."""
        return await self._standing.load(known)

    async def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        """Evaluate a prompt but for its last token and save it as a file.

        Raises HandoffFailed for a prompt that must run whole, and EngineRefused.
        """
        handover = self._handover()
        prompt = LlamaPrompt(call.path, call.body)
        ids = await self._ids(prompt)
        lease = await handover.slots.lease(prompt.raw)
        try:
            server = self._standing.server
            timings = await server.evaluate(ids[:-1], lease.slot, prompt.lora)
        except BaseException:
            lease.give_back()
            raise
        lease.holds(prompt.raw)
        parcel = await handover.save(lease, ids[:-1])
        attributes = msgspec.json.encode(parcel).decode()
        yield Handoff(parcel.saved.name, self.worker_id, CONNECTOR, attributes)
        yield PrefillDone(len(ids), timings.cache_n, timings.prompt_ms / 1e3)

    async def _ids(self, prompt: LlamaPrompt) -> list[int]:
        server, props = self._standing.server, self._standing.props
        try:
            ids = await prompt.ids(server, props.media_marker)
            if len(ids) < 2:
                raise RunsWhole(f"a prompt of {len(ids)} tokens leaves nothing to hand over")
            if len(ids) >= props.slot_tokens:
                raise RunsWhole(f"{len(ids)} tokens do not fit into a slot of {props.slot_tokens}")
        except RunsWhole as error:
            raise HandoffFailed(self.origin.url, str(error), "it is run whole") from error
        return ids

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        """Answer a request. Raises HandoffFailed when the KV that was promised is not usable."""
        if handoff is not None:
            return await self._take_over(call, handoff, self._handover())
        if self._standing.handover is None or call.path in _NO_SLOT:
            return await self._send(call, call.body)
        slots = self._standing.handover.slots
        if call.path not in _ONE_SLOT:  # the server takes whichever it likes: no other may be held
            lease = await slots.lease(everything=True)
            lease.holds(b"")
            return await self._answer(call, call.body, lease)
        prompt = LlamaPrompt(call.path, call.body)
        lease = await slots.lease(prompt.raw, everything=prompt.choices > 1)
        lease.holds(prompt.raw)
        anew: dict[str, object] = {"cache_prompt": False} if call.fresh else {}
        fields = {"id_slot": lease.slot, **anew}
        return await self._answer(call, with_fields(call.body, fields), lease)

    async def _take_over(
        self, call: BackendCall, handoff: Handoff, handover: Handover
    ) -> UpstreamResponse:
        now_s = asyncio.get_running_loop().time
        prompt = LlamaPrompt(call.path, call.body)
        lease = await handover.slots.lease(everything=prompt.choices > 1)
        begun_s = now_s()
        try:
            saved = await handover.fetch(handoff)
        except BaseException:
            lease.give_back()
            raise
        await handover.restore(lease, saved)
        took_s = spent_s(handoff) + now_s() - begun_s
        lease.holds(prompt.raw)
        body = with_fields(call.body, {"id_slot": lease.slot, "cache_prompt": True})
        response = await self._answer(call, body, lease)
        response.headers = (
            *response.headers,
            (b"x-splitserve-transfer-ms", b"%.3f" % (took_s * 1e3)),
            (b"x-splitserve-transfer-bytes", b"%d" % saved.size_bytes),
        )
        return response

    async def _answer(self, call: BackendCall, body: bytes, lease: Lease) -> UpstreamResponse:
        """Send a request whose slots are on lease until its answer is closed."""
        try:
            response = await self._send(call, body)
        except BaseException:
            lease.give_back()
            raise
        response.on_close(lease.give_back)
        return response

    async def _send(self, call: BackendCall, body: bytes) -> UpstreamResponse:
        return await self._upstream.request(
            self.origin,
            b"POST",
            call.path,
            headers=(*call.headers, *self._headers),
            body=body,
            deadlines=self._deadlines,
        )

    def _handover(self) -> Handover:
        assert self._standing.handover is not None, f"{self.worker_id} takes no part in hand-offs"
        return self._standing.handover

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        """Delete the file on this side; the decode side deletes its own."""
        await self._handover().release(handoff.handoff_id)

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        """All of the prompt but its last token should have been in the slot."""
        if counts.cached_tokens is None:
            return None
        return max(0, promised_tokens(handoff) - counts.cached_tokens)

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        """5xx and 429 may go better elsewhere; any other error is the client's to see."""
        return Failure.REFUSED if status >= 500 or status == 429 else None
