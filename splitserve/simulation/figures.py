"""Figures of a policy: raw values of each window, put together at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from splitserve.performance.coefficients import Coefficients
from splitserve.simulation.results import Outcome, jain, percentiles, wilson95, worst_tenth

Json = dict[str, Any]

_GAP_STEP_S = 1e-4  # gaps between tokens are counted with this resolution


@dataclass(slots=True)
class Count:
    """Requests of one class: within their targets, ended, and scheduled at all."""

    met: int = 0
    done: int = 0
    total: int = 0

    def see(self, outcome: Outcome) -> None:
        """Count one."""
        self.met += outcome.good
        self.done += outcome.done
        self.total += 1

    def plus(self, other: Count) -> Count:
        """Return the sum."""
        return Count(self.met + other.met, self.done + other.done, self.total + other.total)

    @property
    def share(self) -> float:
        """Attainment; 1 when there was nothing to attain."""
        return self.met / self.total if self.total else 1.0

    def json(self) -> Json:
        """Return met, total, done and the interval."""
        interval = [round(edge, 4) for edge in wilson95(self.met, self.total)]
        return {"met": self.met, "total": self.total, "done": self.done, "wilson95": interval}


@dataclass(slots=True)
class ModelFit:
    """What the router made of one worker's speed, and the truth."""

    decode_error: float
    prefill_error: float
    fitted: Coefficients
    true: Coefficients

    def json(self) -> Json:
        """Return coefficients in milliseconds."""
        return {
            "error": {
                "decode": round(self.decode_error, 4),
                "prefill": round(self.prefill_error, 4),
            },
            "coefficients_fitted": coefficients_ms(self.fitted),
            "coefficients_true": coefficients_ms(self.true),
        }


@dataclass(slots=True)
class WindowFigures:
    """What one policy did in one window. Token counts are of the whole window, `scored_s` of the
    part whose arrivals count.
    """

    start_s: float
    seed: int
    length_s: float
    scored_s: float
    classes: dict[str, Count] = field(default_factory=dict)
    batch: Count = field(default_factory=Count)
    ttfts_s: list[float] = field(default_factory=list)
    tpots_s: list[float] = field(default_factory=list)
    worst_s: list[float] = field(default_factory=list)
    gaps: Counter[int] = field(default_factory=Counter)
    output_tokens: int = 0
    batch_tokens: int = 0
    errors: int = 0
    preemptions: int = 0
    tenants: dict[str, float] = field(default_factory=dict)
    fits: dict[str, ModelFit] = field(default_factory=dict)

    def see(self, outcome: Outcome) -> None:
        """Take in one request's fate."""
        trace = outcome.trace
        if outcome.done:
            self.output_tokens += outcome.output_tokens
            served = trace.prompt_tokens + 2.0 * outcome.output_tokens
            self.tenants[trace.tenant] = self.tenants.get(trace.tenant, 0.0) + served
        if trace.batch:
            self.batch.see(outcome)
            self.batch_tokens += outcome.output_tokens if outcome.done else 0
        elif outcome.arrived_s < self.scored_s:
            self._see_targeted(outcome)

    def _see_targeted(self, outcome: Outcome) -> None:
        self.classes.setdefault(outcome.trace.service_class, Count()).see(outcome)
        self.errors += outcome.rejected
        if outcome.ttft_s is not None:
            self.ttfts_s.append(outcome.ttft_s)
        if outcome.tpot_s is not None:
            self.tpots_s.append(outcome.tpot_s)
        gaps_s = list(outcome.gaps_s())
        self.gaps.update(round(gap_s / _GAP_STEP_S) for gap_s in gaps_s)
        worst_s = worst_tenth(gaps_s)
        if worst_s is not None:
            self.worst_s.append(worst_s)

    def targeted(self) -> Count:
        """Return the count over every class with targets."""
        return _total(self.classes.values())

    def json(self, groups: Mapping[str, tuple[str, ...]]) -> Json:
        """Return the figures of this window alone."""
        targeted = self.targeted()
        return {
            "start_s": self.start_s,
            "seed": self.seed,
            "goodput_rps": round(targeted.met / self.scored_s, 4),
            "attainment": attainment([self], groups),
            "batch_jobs_done": self.batch.done,
        }


def figures(windows: list[WindowFigures], groups: Mapping[str, tuple[str, ...]]) -> Json:
    """Return one policy's figures over all its windows.

    Shares and goodput are of all windows together; `mean_of_windows` weighs each window alike.
    """
    scored_s = sum(w.scored_s for w in windows)
    length_s = sum(w.length_s for w in windows)
    tenants: Counter[str] = Counter()
    for window in windows:
        tenants.update(window.tenants)
    gaps: Counter[int] = sum((w.gaps for w in windows), Counter())
    return {
        "goodput_rps": round(sum(w.targeted().met for w in windows) / scored_s, 4),
        "mean_of_windows": round(sum(w.targeted().share for w in windows) / len(windows), 4),
        "attainment": attainment(windows, groups),
        "ttft_ms": _ms([v for w in windows for v in w.ttfts_s]),
        "tpot_ms": _ms([v for w in windows for v in w.tpots_s]),
        "itl_ms": _gap_percentiles(gaps),
        "worst_tenth_ms": _ms([v for w in windows for v in w.worst_s]),
        "output_tok_s": round(sum(w.output_tokens for w in windows) / length_s, 2),
        "batch_tok_s": round(sum(w.batch_tokens for w in windows) / length_s, 2),
        "batch_jobs_done": [w.batch.done for w in windows],
        "errors": sum(w.errors for w in windows),
        "preemptions": sum(w.preemptions for w in windows),
        "jain": round(jain(list(tenants.values())), 4),
        "model_error": _model_error(windows),
        "workers": {name: fit.json() for name, fit in windows[-1].fits.items()},
        "windows": [w.json(groups) for w in windows],
    }


def attainment(windows: Iterable[WindowFigures], groups: Mapping[str, tuple[str, ...]]) -> Json:
    """Return met, total and interval per class, per group of classes, and of batch."""
    classes: dict[str, Count] = {}
    batch = Count()
    for window in windows:
        batch = batch.plus(window.batch)
        for name, count in window.classes.items():
            classes[name] = classes.get(name, Count()).plus(count)
    named = {
        name: _total(classes[member] for member in members if member in classes)
        for name, members in groups.items()
    }
    known = {**named, **classes, **({"batch": batch} if batch.total else {})}
    return {name: count.json() for name, count in known.items()}


def coefficients_ms(speed: Coefficients) -> Json:
    """Return a latency model's coefficients in milliseconds, by the names of scenario files."""
    names = {
        "step": speed.step_s,
        "per_sequence": speed.per_sequence_s,
        "per_kv_token": speed.per_kv_token_s,
        "prefill_step": speed.prefill_step_s,
        "per_prompt_token": speed.per_prompt_token_s,
        "per_prompt_token2": speed.per_prompt_token2_s,
    }
    return {name: float(f"{value * 1e3:.4g}") for name, value in names.items()}


def _total(counts: Iterable[Count]) -> Count:
    total = Count()
    for count in counts:
        total = total.plus(count)
    return total


def _ms(values_s: list[float]) -> Json:
    return {
        name: None if value is None else round(value * 1e3, 2)
        for name, value in percentiles(values_s).items()
    }


def _gap_percentiles(gaps: Counter[int]) -> Json:
    wanted = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    total, seen = sum(gaps.values()), 0
    found: Json = dict.fromkeys(wanted)
    for step in sorted(gaps):
        seen += gaps[step]
        for name, share in wanted.items():
            if found[name] is None and seen >= share * total:
                found[name] = round(step * _GAP_STEP_S * 1e3, 2)
    return found


def _model_error(windows: list[WindowFigures]) -> Json:
    fits = [fit for window in windows for fit in window.fits.values()]
    count = max(1, len(fits))
    return {
        "decode": round(sum(f.decode_error for f in fits) / count, 4),
        "prefill": round(sum(f.prefill_error for f in fits) / count, 4),
    }
