"""Any OpenAI-compatible server: whole requests only.

Routes used: `GET /v1/models`, `GET /health` where it exists, and the client's own route.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec

from router.backends.base import BackendCall, PrefillDone, Target
from router.backends.probing import get_json
from router.upstream import Upstream, UpstreamResponse
from router.usage import TokenCounts
from router.wire import Deadlines
from splitserve.messages import Failure, Handoff, Role, WorkerSnapshot


class _ModelCard(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_ModelCard]


class OpenAIBackend:
    """An aggregated worker behind the OpenAI API."""

    engine = "openai"

    def __init__(self, target: Target, upstream: Upstream, deadlines: Deadlines) -> None:
        self.worker_id = target.worker_id
        self.origin = target.origin
        self._upstream = upstream
        self._role = target.role
        self._headers = target.options.headers
        self._deadlines = deadlines

    async def probe(self) -> WorkerSnapshot:
        """Read the model list. Raises ValueError when the answer is not one."""
        status, body = await get_json(self._upstream, self.origin, b"/v1/models", self._headers)
        if status != 200:
            raise ValueError(f"GET /v1/models answered {status}")
        try:
            cards = msgspec.json.decode(body, type=_ModelList).data
        except msgspec.DecodeError as error:
            raise ValueError(f"GET /v1/models is not a model list: {error}") from error
        return WorkerSnapshot(
            worker_id=self.worker_id,
            role=Role.AGGREGATED if self._role is Role.AUTO else self._role,
            engine=self.engine,
            models=tuple(card.id for card in cards),
            max_running=256,
            max_context_tokens=max((c.max_model_len or 0 for c in cards), default=0),
        )

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Plain OpenAI servers tell no load; that they list their models says they live."""
        probed = await self.probe()
        return replace(known, models=probed.models)

    def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        """Never called: a worker without a connector is not offered for a split."""
        raise AssertionError(f"{self.worker_id} cannot hand over KV")

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        """Send the client's request as it came."""
        assert handoff is None, f"{self.worker_id} cannot take over KV"
        return await self._upstream.request(
            self.origin,
            b"POST",
            call.path,
            headers=(*call.headers, *self._headers),
            body=call.body,
            deadlines=self._deadlines,
        )

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        """There is nothing to release."""

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        """Never called: it takes no hand-off."""
        return None

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        """5xx and 429 may go better elsewhere; any other error is the client's to see."""
        return Failure.REFUSED if status >= 500 or status == 429 else None
