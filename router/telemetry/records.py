"""Decision records: why a request went where it went, and what came of it.

The last `limit` requests are kept; the oldest is forgotten first. A record is a few references
while a request runs and becomes JSON only when somebody asks.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from splitserve.messages import Candidate, Choice, GenerateRequest, PlanKind
from splitserve.targets import met_targets

_KEPT_CANDIDATES = 32


@dataclass(slots=True)
class Record:
    """One request's story. Times named `_s` are on the dispatcher's clock, `wall_s` is UTC."""

    request: GenerateRequest
    wall_s: float
    arrived_s: float
    client_id: str = ""
    choice: Choice = field(default_factory=Choice)
    candidates_left_out: int = 0
    attempts: int = 0
    released_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    prefill_s: float | None = None
    transfer_s: float | None = None
    transfer_bytes: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    recomputed_tokens: int | None = None
    output_tokens: int = 0
    finish: str = ""
    failures: list[str] = field(default_factory=list)

    def keep(self, choice: Choice) -> None:
        """Take a decision in: of a large fleet's many candidates, the chosen and the soonest."""
        candidates = choice.candidates
        self.candidates_left_out = max(0, len(candidates) - _KEPT_CANDIDATES)
        if self.candidates_left_out:
            best = sorted(candidates, key=lambda c: (not c.feasible, c.predicted_ttft_s))
            best = [each for each in best if each is not choice.chosen]
            first = [] if choice.chosen is None else [choice.chosen]
            choice = Choice(tuple([*first, *best][:_KEPT_CANDIDATES]), choice.chosen)
        self.choice = choice

    @property
    def queue_s(self) -> float:
        """Seconds between arrival and the last dispatch."""
        return 0.0 if self.released_s is None else self.released_s - self.arrived_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds between arrival and the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens; None for fewer than two."""
        if self.first_token_s is None or self.last_token_s is None or self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        """Seconds between arrival and the last token of an answer that ended normally."""
        if self.finish != "done" or self.last_token_s is None:
            return None
        return self.last_token_s - self.arrived_s

    @property
    def met_targets(self) -> bool:
        """Whether it ended normally and within its targets."""
        return met_targets(
            self.request.slo, ttft_s=self.ttft_s, tpot_s=self.tpot_s, e2e_s=self.e2e_s
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as users see it."""
        request, slo = self.request, self.request.slo
        chosen = self.choice.chosen
        return {
            "request_id": request.request_id,
            "client_request_id": self.client_id or None,
            "time": self.wall_s,
            "model": request.model,
            "class": request.service_class,
            "targets": {
                "ttft_ms": _ms(slo.ttft_s),
                "tpot_ms": _ms(slo.tpot_s),
                "deadline_ms": _ms(slo.deadline_s),
            },
            "prompt_tokens": self.prompt_tokens or request.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "candidates": [_candidate(each) for each in self.choice.candidates],
            "candidates_left_out": self.candidates_left_out,
            "chosen": None if chosen is None else _candidate(chosen),
            "attempts": self.attempts,
            "failures": self.failures,
            "released_ms": _ms(self.queue_s if self.released_s is not None else None),
            "actual": {
                "ttft_ms": _ms(self.ttft_s),
                "tpot_ms": _ms(self.tpot_s),
                "prefill_ms": _ms(self.prefill_s),
                "transfer_ms": _ms(self.transfer_s),
                "transfer_bytes": self.transfer_bytes,
                "recomputed_tokens": self.recomputed_tokens,
                "output_tokens": self.output_tokens,
                "finish": self.finish or "running",
                "met_targets": self.met_targets,
            },
        }


def workers_of(chosen: Candidate) -> dict[str, str]:
    """Return which worker does what under a plan."""
    if chosen.plan is PlanKind.AGGREGATED:
        return {"aggregated": chosen.decode_worker}
    return {"prefill": chosen.prefill_worker, "decode": chosen.decode_worker}


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "plan": candidate.plan.value,
        "workers": workers_of(candidate),
        "predicted_ttft_ms": _ms(candidate.predicted_ttft_s),
        "predicted_tpot_ms": _ms(candidate.predicted_tpot_s),
        "transfer_ms": _ms(candidate.transfer_s),
        "feasible": candidate.feasible,
        "why_not": candidate.why_not or None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


class RecordStore:
    """The last `limit` records, by the router's id and by the client's."""

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._aliases: dict[str, str] = {}

    def add(self, record: Record) -> None:
        """Keep a record, forgetting the oldest beyond the limit."""
        request_id = record.request.request_id
        self._records[request_id] = record
        if record.client_id:
            self._aliases[record.client_id] = request_id
        if len(self._records) > self._limit:
            old_id, old = self._records.popitem(last=False)
            if self._aliases.get(old.client_id) == old_id:
                del self._aliases[old.client_id]

    def find(self, request_id: str) -> Record | None:
        """Return a record by either id; of several with one client id, the latest."""
        return self._records.get(self._aliases.get(request_id, request_id))

    def latest(self, count: int) -> list[Record]:
        """Return the newest records, newest first."""
        newest = reversed(self._records.values())
        return [record for record, _ in zip(newest, range(count), strict=False)]

    def __len__(self) -> int:
        return len(self._records)
