"""What became of each request, and the figures that are reported of many."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from splitserve.messages import PlanKind, Refusal
from splitserve.simulation.trace import TraceRequest
from splitserve.targets import met_targets

_Z = 1.96  # of a 95 % interval


@dataclass(eq=False, slots=True)
class Outcome:
    """One request's fate. Times in seconds on the virtual clock; TTFT counts from `arrived_s`.

    `bursts` are the steps (first, last) of its engine that gave it a token, `step_ends_s` when that
    engine's steps ended.
    """

    trace: TraceRequest
    arrived_s: float
    released_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int = 0
    refusal: Refusal | None = None
    plan: PlanKind | None = None
    predicted_ttft_s: float | None = None
    transfer_s: float | None = None
    bursts: tuple[tuple[int, int], ...] = ()
    step_ends_s: Sequence[float] = ()

    @property
    def done(self) -> bool:
        """True when the answer is complete."""
        return self.last_token_s is not None

    @property
    def rejected(self) -> bool:
        """True when it ended without an answer, or without the rest of it."""
        return self.refusal is not None

    @property
    def ttft_s(self) -> float | None:
        """Arrival to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens; None below two tokens."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Arrival to last token."""
        return None if self.last_token_s is None else self.last_token_s - self.arrived_s

    @property
    def good(self) -> bool:
        """Ended normally and within every target."""
        return met_targets(self.trace.slo, ttft_s=self.ttft_s, tpot_s=self.tpot_s, e2e_s=self.e2e_s)

    def gaps_s(self) -> Iterator[float]:
        """Yield the time between each two successive tokens of a finished answer."""
        ends_s, last_s = self.step_ends_s, None
        for first, last in self.bursts:
            for step in range(first, last + 1):
                if last_s is not None:
                    yield ends_s[step - 1] - last_s
                last_s = ends_s[step - 1]


def wilson95(met: int, total: int) -> tuple[float, float]:
    """95 % Wilson interval of a share: (low, high)."""
    if total == 0:
        return (0.0, 1.0)
    share = met / total
    base = 1 + _Z * _Z / total
    centre = (share + _Z * _Z / (2 * total)) / base
    half = _Z * math.sqrt(share * (1 - share) / total + _Z * _Z / (4 * total * total)) / base
    return (max(0.0, centre - half), min(1.0, centre + half))


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """p50, p90 and p99 by the nearest rank; None without values."""
    ordered = sorted(values)
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    if not ordered:
        return dict.fromkeys(ranks)
    return {n: ordered[max(0, math.ceil(q * len(ordered)) - 1)] for n, q in ranks.items()}


def worst_tenth(gaps_s: Sequence[float]) -> float | None:
    """Mean of the longest tenth of a request's gaps, at least one; None without gaps."""
    if not gaps_s:
        return None
    longest = sorted(gaps_s)[-max(1, len(gaps_s) // 10) :]
    return sum(longest) / len(longest)


def jain(services: Sequence[float]) -> float:
    """Jain's index of what each tenant got: 1 is even, 1/n is all to one."""
    total = sum(services)
    if total <= 0:
        return 1.0
    return total * total / (len(services) * sum(s * s for s in services))
