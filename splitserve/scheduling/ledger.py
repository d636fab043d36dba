"""What each worker has been given and not yet given back.

Reports are stale by one interval, so arrivals that trusted them alone would herd onto one worker.
The ledger is the scheduler's own truth: every leg is booked when it is ordered and unbooked once.
Sums are kept as bookings change, so that pricing a plan never scans a worker's streams.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

from splitserve.messages import GenerateRequest, Leg, PairJudged, WorkerSnapshot
from splitserve.pairing import Pairs
from splitserve.performance.coefficients import area, from_rates
from splitserve.performance.worker_model import WorkerModel

LegKey = tuple[str, int, Leg]  # request, attempt, leg


class Phase(IntEnum):
    """Where a booked leg is."""

    PENDING = 0  # its prompt is being computed here, or waits to be
    TRANSFER = 1  # its KV is computed elsewhere and on its way
    DECODING = 2  # tokens come


@dataclass(eq=False, slots=True)
class Booking:
    """Work promised to a worker.

    `uncached_tokens` are to be prefilled here, behind `cached_tokens` that are there; `kv_tokens`
    is what it will hold at its end. `alone` stays true while nothing else is pending beside it, so
    that its time to first token tells the worker's prefill speed. `decodes_here` is false for the
    prefill of a hand-off.
    """

    request: GenerateRequest
    phase: Phase
    uncached_tokens: int
    cached_tokens: int
    kv_tokens: int
    dispatched_s: float
    batch: bool = False
    alone: bool = True
    decodes_here: bool = True
    streams_then: int = 0
    kv_then: int = 0
    first_token_s: float = 0.0
    tokens: int = 0
    last_token_s: float = 0.0
    quiet_tokens: int = 0
    quiet_s: float = -1.0

    @property
    def area(self) -> float:
        """Attended pairs of its prefill."""
        return area(self.uncached_tokens, self.cached_tokens)

    @property
    def held_tokens(self) -> int:
        """KV it holds now: its prompt and what it has said."""
        return self.request.prompt_tokens + self.tokens


@dataclass(eq=False, slots=True)
class Ticks:
    """One counter for all accounts, so that versions of different workers can be compared."""

    value: int = 0

    def next(self) -> int:
        """Count one change."""
        self.value += 1
        return self.value


@dataclass(eq=False, slots=True)
class WorkerAccount:
    """One worker: its last report, its latency model and the legs booked on it."""

    snapshot: WorkerSnapshot
    model: WorkerModel
    bookings: dict[LegKey, Booking] = field(default_factory=dict)
    pending_prefill_tokens: int = 0  # Q
    pending_area: float = 0.0  # Z
    pending: int = 0
    leaving: int = 0  # of the pending, those that will decode elsewhere
    transfers: int = 0
    streams: int = 0  # N
    kv_streams_tokens: int = 0  # K of the streams
    kv_arriving_tokens: int = 0  # prompts of pending and transfers
    booked_kv_tokens: int = 0
    batch_kv_tokens: int = 0
    batch_pending: int = 0
    version: int = 0  # when it last changed: a member, its progress, what it reports of itself
    ticks: Ticks = field(default_factory=Ticks)

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        return self.snapshot.worker_id

    @property
    def in_flight(self) -> int:
        """Legs ordered and not ended."""
        return len(self.bookings)

    @property
    def streams_soon(self) -> int:
        """N^: streams once everything that is under way has arrived."""
        return self.streams + self.pending - self.leaving + self.transfers

    @property
    def kv_soon_tokens(self) -> int:
        """K^: KV held once everything that is under way has arrived."""
        return self.kv_streams_tokens + self.kv_arriving_tokens

    def why_full(self, kv_tokens: int) -> str:
        """Return "" when one more leg of `kv_tokens` fits, else the limit that it would break."""
        if self.in_flight >= self.snapshot.max_running:
            return f"full: {self.in_flight} of {self.snapshot.max_running} running"
        room_tokens = self.snapshot.kv_capacity_tokens
        if self.bookings and room_tokens and self.booked_kv_tokens + kv_tokens > room_tokens:
            return f"no KV room: {self.booked_kv_tokens} of {room_tokens} tokens booked"
        return ""

    # --- changes --------------------------------------------------------------------------------

    def book(self, key: LegKey, booking: Booking) -> None:
        """Promise work. A leg is booked once."""
        assert key not in self.bookings, f"{key} is booked twice"
        if booking.phase is Phase.PENDING:
            booking.alone = self.pending == 0
            booking.streams_then, booking.kv_then = self.streams, self.kv_streams_tokens
            for other in self.bookings.values() if self.pending else ():
                other.alone = False
        self.bookings[key] = booking
        self._count(booking, 1)
        self._disturbed()

    def first_token(self, key: LegKey, now_s: float) -> None:
        """Its tokens come now."""
        booking = self.bookings.get(key)
        if booking is None or booking.phase is Phase.DECODING:
            return
        self._count(booking, -1)
        booking.phase = Phase.DECODING
        booking.first_token_s = booking.last_token_s = now_s
        booking.tokens = 1
        self._count(booking, 1)
        self._disturbed()

    def progress(self, key: LegKey, tokens: int, at_s: float) -> None:
        """It has said `tokens` in all, the last one at `at_s`."""
        booking = self.bookings.get(key)
        if booking is None or booking.phase is not Phase.DECODING or tokens <= booking.tokens:
            return
        self.kv_streams_tokens += tokens - booking.tokens
        if booking.batch:
            self.batch_kv_tokens += tokens - booking.tokens
        if self.pending == 0 and not self.transfers:
            self._learn_gap(booking, tokens, at_s)
        booking.tokens, booking.last_token_s = tokens, at_s
        self.version = self.ticks.next()

    def _learn_gap(self, booking: Booking, tokens: int, at_s: float) -> None:
        """Learn from the oldest stream, over a stretch in which nobody came or left."""
        oldest = next(iter(self.bookings.values()))
        if booking is not oldest:
            return
        if booking.quiet_s >= 0 and tokens > booking.quiet_tokens:
            step_s = (at_s - booking.quiet_s) / (tokens - booking.quiet_tokens)
            self.model.saw_decode(self.streams, self.kv_streams_tokens, step_s)
        booking.quiet_s, booking.quiet_tokens = at_s, tokens

    def unbook(self, key: LegKey) -> Booking | None:
        """Take a promise back; unknown keys are legs that ended before."""
        booking = self.bookings.pop(key, None)
        if booking is not None:
            self._count(booking, -1)
            self._disturbed()
        return booking

    def _disturbed(self) -> None:
        self.version = self.ticks.next()
        if self.bookings:
            next(iter(self.bookings.values())).quiet_s = -1.0

    def _count(self, booking: Booking, sign: int) -> None:
        held = sign * booking.held_tokens
        match booking.phase:
            case Phase.PENDING:
                self.pending += sign
                self.leaving += sign * (not booking.decodes_here)
                self.pending_prefill_tokens += sign * booking.uncached_tokens
                self.pending_area += sign * booking.area
                self.kv_arriving_tokens += held
                self.batch_pending += sign * booking.batch
            case Phase.TRANSFER:
                self.transfers += sign
                self.kv_arriving_tokens += held
            case Phase.DECODING:
                self.streams += sign
                self.kv_streams_tokens += held
        if booking.batch:
            self.batch_kv_tokens += held
        self.booked_kv_tokens += sign * booking.kv_tokens
        if self.pending == 0:
            self.pending_area = 0.0  # no rounding may pile up


@dataclass(slots=True)
class Ledger:
    """All workers that are alive, by id, in the order in which they joined."""

    workers: dict[str, WorkerAccount] = field(default_factory=dict)
    models_seen: set[str] = field(default_factory=set)
    ticks: Ticks = field(default_factory=Ticks)
    pairs: Pairs = field(default_factory=Pairs)

    def report(self, snapshot: WorkerSnapshot) -> None:
        """Take in a report; a worker's first report is how it joins."""
        self.models_seen.update(snapshot.models)
        account = self.workers.get(snapshot.worker_id)
        if account is None:
            account = WorkerAccount(snapshot, _model_of(snapshot), ticks=self.ticks)
            account.version = self.ticks.next()
            self.workers[snapshot.worker_id] = account
            return
        if _terms(account.snapshot) != _terms(snapshot):
            account.version = self.ticks.next()
        account.snapshot = snapshot
        if not account.model.learnt and not account.model.fixed:
            account.model = _model_of(snapshot)

    def serving(self, model: str) -> list[WorkerAccount]:
        """Workers that have `model`, draining ones included."""
        return [a for a in self.workers.values() if model in a.snapshot.models]

    def lose(self, worker_id: str) -> None:
        """Forget a worker."""
        self.workers.pop(worker_id, None)
        if self.pairs.forget(worker_id):
            self._pairs_changed()

    def judge(self, event: PairJudged) -> None:
        """Quarantine a pair, or lift that. A worker that has left meanwhile is no matter."""
        known = event.prefill_worker in self.workers and event.decode_worker in self.workers
        if known and self.pairs.judge(event):
            self._pairs_changed()

    def lift_quarantines(self, now_s: float) -> None:
        """End those whose time is over."""
        if self.pairs.quarantined and self.pairs.lift(now_s):
            self._pairs_changed()

    def _pairs_changed(self) -> None:
        """Whether anything can be split decides who may run it whole: look at everybody again."""
        for account in self.workers.values():
            account.version = self.ticks.next()

    def unbook(self, worker_id: str, key: LegKey) -> Booking | None:
        """Unbook a leg, on a worker that may be gone."""
        account = self.workers.get(worker_id)
        return None if account is None else account.unbook(key)


def _terms(snapshot: WorkerSnapshot) -> WorkerSnapshot:
    """What of a report decides plans; the rest is gauges that the ledger knows better."""
    return replace(
        snapshot, running=0, waiting=0, kv_used_tokens=0, prefill_tok_s=0.0, decode_tok_s=0.0
    )


def _model_of(snapshot: WorkerSnapshot) -> WorkerModel:
    """Start a model from what the worker says of itself."""
    coefficients = snapshot.coefficients or from_rates(
        snapshot.prefill_tok_s, snapshot.decode_tok_s, snapshot.step_tokens or 2048
    )
    return WorkerModel(coefficients, fixed=snapshot.exact)
