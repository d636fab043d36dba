"""Any OpenAI-compatible server: whole requests only.

Ollama, LM Studio, Text Generation Inference, MLX, LiteLLM and remote APIs are told apart by what
they tell of themselves (see `plain_servers`) and spoken to alike: with `GET /v1/models`, where it
exists, and the client's own route. A server that lists no models joins when the configuration
names one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from router.backends.base import BackendCall, PrefillDone, Target
from router.backends.model_list import ModelCard, context_tokens, parse_models
from router.backends.plain_servers import ServerKind, identify
from router.backends.probing import get_json
from router.upstream import Upstream, UpstreamResponse
from router.usage import TokenCounts
from router.wire import Deadlines
from splitserve.messages import Failure, Handoff, Role, WorkerSnapshot


class OpenAIBackend:
    """An aggregated worker behind the OpenAI API."""

    engine = "openai"

    def __init__(self, target: Target, upstream: Upstream, deadlines: Deadlines) -> None:
        self.worker_id = target.worker_id
        self.origin = target.origin
        self._upstream = upstream
        self._role = target.role
        self._options = target.options
        self._headers = target.options.headers
        self._deadlines = deadlines
        self._lists = True

    @property
    def _named(self) -> str:
        """The engine's own name of the model that the configuration names; "" for none."""
        return self._options.engine_model or self._options.model

    async def probe(self) -> WorkerSnapshot:
        """Find its models and its kind. Raises ValueError when it does not look like a server."""
        cards, trouble = await self._list()
        self._lists = not trouble
        kind = await identify(self._upstream, self.origin, self._headers)
        notes = [f"version {kind.version}"] if kind.version else []
        if trouble and kind.cards:
            cards = kind.cards
        elif trouble:
            if not self._named:
                raise ValueError(f"{trouble}; to use it all the same, name its model")
            cards = (ModelCard(self._named),)
            notes.append(f"{trouble}: its model is taken from the configuration")
        running, assumed = self._running(kind)
        told = {card.name: card for card in kind.cards if card.context_tokens}
        cards = tuple(told.get(card.name, card) for card in cards)
        return WorkerSnapshot(
            worker_id=self.worker_id,
            role=Role.AGGREGATED if self._role is Role.AUTO else self._role,
            engine=kind.engine,
            models=tuple(card.name for card in cards),
            max_running=running,
            max_context_tokens=kind.context_tokens or context_tokens(cards, self._named),
            notes=(*notes, *assumed),
        )

    def _running(self, kind: ServerKind) -> tuple[int, list[str]]:
        """Return how many requests it may get at once, and a note where that is assumed."""
        known = self._options.max_running or kind.max_running
        if known:
            return known, []
        note = (
            f"max_running {kind.usual_running} is assumed, since it does not tell; "
            f"set max_running to {kind.limit_setting}"
        )
        return kind.usual_running, [note]

    async def _list(self) -> tuple[tuple[ModelCard, ...], str]:
        """Return its models, or why it has no list of them. Raises ValueError for 5xx and none."""
        status, body = await get_json(self._upstream, self.origin, b"/v1/models", self._headers)
        if status >= 500:
            raise ValueError(f"GET /v1/models answered {status}")
        if status != 200:
            return (), f"GET /v1/models answered {status}"
        try:
            cards = parse_models(body)
        except ValueError as error:
            return (), f"GET /v1/models is not a model list: {error}"
        if not cards:
            raise ValueError("GET /v1/models lists no model")
        return cards, ""

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Plain OpenAI servers tell no load; that they list their models says they live."""
        cards, trouble = await self._list()
        if not trouble:
            return replace(known, models=tuple(card.name for card in cards))
        if self._lists:
            raise ValueError(trouble)
        return known  # it never listed them, and it answers

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
