"""What it takes to move KV between two workers, measured from real hand-offs."""

from __future__ import annotations

from dataclasses import dataclass, field

_WEIGHT = 0.2
_LEAST_BYTES = 1 << 20  # smaller transfers tell latency, not rate
LATENCY_S = 0.010
ASSUMED_BYTES_S = 100e6  # a plain gigabit link: priced so, until one hand-off was timed


@dataclass(slots=True)
class Link:
    """One direction of one pair. `rate_bytes_s` 0: not measured."""

    rate_bytes_s: float = 0.0
    latency_s: float = LATENCY_S
    samples: int = 0

    def see(self, moved_bytes: int, took_s: float) -> None:
        """Learn from one hand-off."""
        if moved_bytes < _LEAST_BYTES or took_s <= 0:
            return
        rate_bytes_s = moved_bytes / took_s
        if self.samples == 0 and self.rate_bytes_s == 0.0:
            self.rate_bytes_s = rate_bytes_s
        self.rate_bytes_s += _WEIGHT * (rate_bytes_s - self.rate_bytes_s)
        self.samples += 1


@dataclass(slots=True)
class Links:
    """All pairs, and the bytes that are on their way at each end."""

    pairs: dict[tuple[str, str], Link] = field(default_factory=dict)
    leaving_bytes: dict[str, float] = field(default_factory=dict)
    entering_bytes: dict[str, float] = field(default_factory=dict)

    def of(self, prefill_worker: str, decode_worker: str) -> Link:
        """Return a pair's link, made on first use."""
        pair = (prefill_worker, decode_worker)
        link = self.pairs.get(pair)
        if link is None:
            link = self.pairs[pair] = Link()
        return link

    def transfer_s(self, prefill_worker: str, decode_worker: str, moved_bytes: float) -> float:
        """X: latency, and these bytes behind those queued on either end."""
        link = self.of(prefill_worker, decode_worker)
        queued = max(
            self.leaving_bytes.get(prefill_worker, 0.0),
            self.entering_bytes.get(decode_worker, 0.0),
        )
        return link.latency_s + (queued + moved_bytes) / (link.rate_bytes_s or ASSUMED_BYTES_S)

    def measured(self, prefill_worker: str, decode_worker: str) -> bool:
        """True when this pair's rate is known, by measurement or declaration."""
        return self.of(prefill_worker, decode_worker).rate_bytes_s > 0

    def begin(self, prefill_worker: str, decode_worker: str, moved_bytes: float) -> None:
        """A transfer was ordered."""
        self._add(self.leaving_bytes, prefill_worker, moved_bytes)
        self._add(self.entering_bytes, decode_worker, moved_bytes)

    def end(self, prefill_worker: str, decode_worker: str, moved_bytes: float) -> None:
        """It is over, one way or another."""
        self._add(self.leaving_bytes, prefill_worker, -moved_bytes)
        self._add(self.entering_bytes, decode_worker, -moved_bytes)

    @staticmethod
    def _add(book: dict[str, float], worker_id: str, moved_bytes: float) -> None:
        left = book.get(worker_id, 0.0) + moved_bytes
        if left > 0.5:
            book[worker_id] = left
        else:
            book.pop(worker_id, None)

    def forget(self, worker_id: str) -> None:
        """Drop what is known of a worker that left."""
        for pair in [pair for pair in self.pairs if worker_id in pair]:
            del self.pairs[pair]
        self.leaving_bytes.pop(worker_id, None)
        self.entering_bytes.pop(worker_id, None)
