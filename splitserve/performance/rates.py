"""The first latency model: one prefill rate and one decode step per worker, one rate per link.

Each is an exponentially weighted mean of what was seen, started from the worker's own report. It
is deliberately small: it answers "which worker has least predicted work", no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.messages import WorkerSnapshot

_WEIGHT = 0.2
_PREFILL_TOK_S = 500.0
_DECODE_TOK_S = 20.0
_LINK_BYTES_S = 100e6  # a plain gigabit link, until a hand-off was timed
_LINK_ROUND_TRIP_S = 0.002


@dataclass(slots=True)
class WorkerRates:
    """Seen speed of one worker: prefill tokens per second and seconds per decode step."""

    prefill_tok_s: float = _PREFILL_TOK_S
    decode_step_s: float = 1.0 / _DECODE_TOK_S
    prefill_samples: int = 0
    decode_samples: int = 0

    def adopt(self, snapshot: WorkerSnapshot) -> None:
        """Take the worker's own figures as priors, as long as nothing was measured here."""
        if snapshot.prefill_tok_s > 0 and not self.prefill_samples:
            self.prefill_tok_s = snapshot.prefill_tok_s
        if snapshot.decode_tok_s > 0 and not self.decode_samples:
            self.decode_step_s = 1.0 / snapshot.decode_tok_s

    def saw_prefill(self, tokens: int, duration_s: float) -> None:
        """Learn from a prefill of `tokens` uncached tokens. Under 32 it is all fixed cost."""
        if tokens >= 32 and duration_s > 0:
            self.prefill_tok_s += _WEIGHT * (tokens / duration_s - self.prefill_tok_s)
            self.prefill_samples += 1

    def saw_decode(self, steps: int, duration_s: float) -> None:
        """Learn from `steps` gaps between tokens that took `duration_s` together."""
        if steps >= 1 and duration_s > 0:
            self.decode_step_s += _WEIGHT * (duration_s / steps - self.decode_step_s)
            self.decode_samples += 1


@dataclass(slots=True)
class Rates:
    """The fleet's latency model. Pure state: fed by the Scheduler, asked by policies."""

    workers: dict[str, WorkerRates] = field(default_factory=dict)
    links: dict[tuple[str, str], float] = field(default_factory=dict)

    def of(self, worker_id: str) -> WorkerRates:
        """Return the rates of a worker, made on first use."""
        return self.workers.setdefault(worker_id, WorkerRates())

    def prefill_s(self, worker_id: str, uncached_tokens: int) -> float:
        """Seconds to prefill `uncached_tokens` when nothing else runs."""
        return uncached_tokens / self.of(worker_id).prefill_tok_s

    def decode_step_s(self, worker_id: str) -> float:
        """Seconds between two tokens of one stream."""
        return self.of(worker_id).decode_step_s

    def transfer_s(self, prefill_worker: str, decode_worker: str, kv_bytes: int) -> float:
        """Seconds to move `kv_bytes` over this pair's link, round trip included."""
        rate_bytes_s = self.links.get((prefill_worker, decode_worker), _LINK_BYTES_S)
        return _LINK_ROUND_TRIP_S + kv_bytes / rate_bytes_s

    def saw_transfer(
        self, prefill_worker: str, decode_worker: str, kv_bytes: int, duration_s: float
    ) -> None:
        """Learn a link's rate from a hand-off; small ones tell latency, not rate."""
        if kv_bytes < 1 << 18 or duration_s <= 0:
            return
        pair = (prefill_worker, decode_worker)
        seen_bytes_s = kv_bytes / duration_s
        known_bytes_s = self.links.get(pair, seen_bytes_s)
        self.links[pair] = known_bytes_s + _WEIGHT * (seen_bytes_s - known_bytes_s)

    def forget(self, worker_id: str) -> None:
        """Drop all that was learnt about a worker that left."""
        self.workers.pop(worker_id, None)
        for pair in [pair for pair in self.links if worker_id in pair]:
            del self.links[pair]
