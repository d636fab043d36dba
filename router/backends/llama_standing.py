"""What a llama-server is, how busy, and whether it takes part in hand-offs at the moment."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from router.backends.base import Target, WorkerRestarted
from router.backends.courier_client import CourierClient, Profile
from router.backends.llama_check import CannotSplit, check_split
from router.backends.llama_handover import CONNECTOR, EXAMPLE_FILES, Handover
from router.backends.llama_server import Gauges, LlamaServer, Meta, Props
from router.errors import UpstreamError
from router.upstream import Upstream
from router.wire import Deadlines
from splitserve.messages import Role, WorkerSnapshot

log = logging.getLogger("splitserve.llama_cpp")

_CHECK_AGAIN_S = 30.0
_CHECK_DEADLINES = Deadlines(connect_s=2.0, first_byte_s=30.0, idle_s=5.0)
_NO_COURIER = "no courier is configured for it; start one beside it and write its address"
_NOT_IDLE = "hand-offs are not tried out yet; it must be idle for that"


class Standing:
    """Reads and keeps what a server and its courier say.

    `handover` is there from when a hand-off was seen to work; from then on the router owns the
    slots. `why_whole` says why there are no hand-offs at the moment; "" when there are.
    """

    def __init__(self, target: Target, upstream: Upstream, deadlines: Deadlines) -> None:
        self.why_whole = _NO_COURIER
        self.handover: Handover | None = None
        self.server = LlamaServer(target.origin, target.options.headers, upstream, deadlines)
        self._checker = LlamaServer(
            target.origin, target.options.headers, upstream, _CHECK_DEADLINES
        )
        self._worker_id = target.worker_id
        self._role = target.role
        self._courier: CourierClient | None = None
        if target.options.courier is not None:
            where, key = target.options.courier, target.options.courier_key
            self._courier = CourierClient(where, key, upstream, deadlines)
        self._props: Props | None = None
        self._meta = Meta()
        self._checked_s = float("-inf")
        self._unfit = False  # by how it was started; holds until it is started anew

    @property
    def props(self) -> Props:
        """What it said of itself when it was probed."""
        assert self._props is not None, f"{self._worker_id} was not probed"
        return self._props

    async def probe(self, engine: str) -> WorkerSnapshot:
        """Ask what it is, and try a hand-off where it has a courier. Raises ValueError."""
        self._props = props = await self.server.props()
        names, self._meta = await self.server.models()
        splits = self._courier is not None
        known = WorkerSnapshot(
            worker_id=self._worker_id,
            role=Role.AGGREGATED if self._role is Role.AUTO and not splits else self._role,
            engine=engine,
            models=names,
            max_running=props.total_slots,
            max_context_tokens=props.slot_tokens,
        )
        return await self._look(known)

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Ask how busy it is. Raises WorkerRestarted when another process has taken its place."""
        props = await self.server.props()
        if props.media_marker != self.props.media_marker:
            raise WorkerRestarted("the worker was restarted")
        return await self._look(known)

    async def _look(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """`known` with what was learnt; a server too busy to answer keeps its figures."""
        gauges = await self.server.gauges()
        profile = await self._review(gauges)
        splits = profile is not None and not self.why_whole
        notes = f"version {self.props.build_info}", self.why_whole
        facts = self.handover.facts if self.handover is not None else None
        fresh = replace(
            known,
            connector=CONNECTOR if splits else "",
            pairing_key=self._pairing_key(profile),
            takes=(EXAMPLE_FILES,) if splits and profile is not None and profile.converts else (),
            kv_capacity_tokens=self._capacity_tokens(),
            kv_bytes_per_token=facts.bytes_per_token if facts is not None else 0,
            notes=tuple(note for note in notes if note),
        )
        if gauges is None:
            return fresh
        return replace(fresh, running=gauges.running, waiting=gauges.waiting)

    def _pairing_key(self, profile: Profile | None) -> str:
        if profile is None or self.handover is None:
            return ""
        model, meta = profile.model, self._meta
        weights = f"{meta.n_params} parameters, {meta.n_vocab} words, {meta.size} bytes"
        if model is not None:
            weights = f"{model.sampled_hash}, {model.size_bytes} bytes"
        fields = {"weights": weights, "build": self.props.build_info}
        fields |= self.handover.facts.pairing_fields
        return ";".join(f"{name}={value.replace(';', ',')}" for name, value in fields.items())

    def _capacity_tokens(self) -> int:
        """All slots' tokens; 0 where it is not known whether they share one pool."""
        slots, layout = self.props.total_slots, None
        if slots == 1:
            return self.props.slot_tokens
        if self.handover is not None:
            layout = self.handover.facts.layout
        if layout is None:
            return 0
        return self.props.slot_tokens * (slots if layout.streams > 1 else 1)

    async def _review(self, gauges: Gauges | None) -> Profile | None:
        """Find out whether it takes part in hand-offs now; returns its courier's account."""
        if self._courier is None:
            return None
        profile: Profile | None = None
        try:
            profile = await self._courier.profile()
            why = await self._check(self._courier, gauges)
        except UpstreamError as error:
            why = str(error)
        if why != self.why_whole:
            log.info("%s: %s", self._worker_id, f"runs whole: {why}" if why else "takes hand-offs")
        self.why_whole = why
        return profile

    async def _check(self, courier: CourierClient, gauges: Gauges | None) -> str:
        """Try a hand-off once, when nobody is in its way; returns why it does not work."""
        if self.handover is not None:
            return ""
        now_s = asyncio.get_running_loop().time()
        if self._unfit or now_s - self._checked_s < _CHECK_AGAIN_S:
            return self.why_whole
        if gauges is None or gauges.running or gauges.waiting:
            return _NOT_IDLE
        self._checked_s = now_s
        try:
            facts = await check_split(self._checker, courier, self.props.total_slots)
        except CannotSplit as error:
            self._unfit = True
            return str(error)
        self.handover = Handover(self.server, courier, facts)
        return ""
