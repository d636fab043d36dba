"""What each worker has been given and not yet given back.

Reports are stale by one interval, so arrivals that trusted them alone would herd onto one worker.
The ledger is the scheduler's own truth: every leg is booked when it is ordered and unbooked once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.messages import Leg, WorkerSnapshot

LegKey = tuple[str, int, Leg]  # request, attempt, leg


@dataclass(frozen=True, slots=True)
class Booking:
    """Work promised to a worker: prompt tokens still to prefill, and KV tokens it will hold."""

    prefill_tokens: int
    kv_tokens: int


@dataclass(slots=True)
class WorkerAccount:
    """One worker: its last report and the legs booked on it."""

    snapshot: WorkerSnapshot
    bookings: dict[LegKey, Booking] = field(default_factory=dict)
    pending_prefill_tokens: int = 0
    booked_kv_tokens: int = 0

    @property
    def in_flight(self) -> int:
        """Legs ordered and not ended."""
        return len(self.bookings)

    def why_full(self, kv_tokens: int) -> str:
        """Return "" when one more leg of `kv_tokens` fits, else the limit that it would break."""
        if self.in_flight >= self.snapshot.max_running:
            return f"full: {self.in_flight} of {self.snapshot.max_running} running"
        room_tokens = self.snapshot.kv_capacity_tokens
        if self.bookings and room_tokens and self.booked_kv_tokens + kv_tokens > room_tokens:
            return f"no KV room: {self.booked_kv_tokens} of {room_tokens} tokens booked"
        return ""

    def book(self, key: LegKey, booking: Booking) -> None:
        """Promise work. A leg is booked once."""
        assert key not in self.bookings, f"{key} is booked twice"
        self.bookings[key] = booking
        self.pending_prefill_tokens += booking.prefill_tokens
        self.booked_kv_tokens += booking.kv_tokens

    def prefill_done(self, key: LegKey) -> None:
        """The prompt of this leg is computed; its KV stays booked."""
        booking = self.bookings.get(key)
        if booking is not None and booking.prefill_tokens:
            self.bookings[key] = Booking(0, booking.kv_tokens)
            self.pending_prefill_tokens -= booking.prefill_tokens

    def unbook(self, key: LegKey) -> None:
        """Take a promise back; unknown keys are legs that ended before."""
        booking = self.bookings.pop(key, None)
        if booking is not None:
            self.pending_prefill_tokens -= booking.prefill_tokens
            self.booked_kv_tokens -= booking.kv_tokens


@dataclass(slots=True)
class Ledger:
    """All workers that are alive, by id, in the order in which they joined."""

    workers: dict[str, WorkerAccount] = field(default_factory=dict)
    models_seen: set[str] = field(default_factory=set)

    def report(self, snapshot: WorkerSnapshot) -> None:
        """Take in a report; a worker's first report is how it joins."""
        self.models_seen.update(snapshot.models)
        account = self.workers.get(snapshot.worker_id)
        if account is None:
            self.workers[snapshot.worker_id] = WorkerAccount(snapshot)
        else:
            account.snapshot = snapshot

    def serving(self, model: str) -> list[WorkerAccount]:
        """Workers that have `model`, draining ones included."""
        return [a for a in self.workers.values() if model in a.snapshot.models]

    def unbook(self, worker_id: str, key: LegKey) -> None:
        """Unbook a leg, on a worker that may be gone."""
        account = self.workers.get(worker_id)
        if account is not None:
            account.unbook(key)
