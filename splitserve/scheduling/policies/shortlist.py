"""What simple policies ask of candidates: which to look at, how loaded their ends are.

A whole plan has one worker at both ends; a split one has two, and both count.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest, PlanKind
from splitserve.scheduling.desk import Desk


def whole_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the aggregated candidates if there are any, else all: for who knows no split."""
    return whole(candidates) or list(candidates)


def whole(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the aggregated candidates."""
    return [c for c in candidates if c.plan is PlanKind.AGGREGATED]


def split(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return the disaggregated candidates."""
    return [c for c in candidates if c.plan is PlanKind.DISAGGREGATED]


def ids(candidate: Candidate) -> tuple[str, str]:
    """Return what ties are broken by, where a rule says nothing of them."""
    return candidate.prefill_worker, candidate.decode_worker


def in_flight(desk: Desk, candidate: Candidate) -> int:
    """Legs that run on the candidate's workers, in number."""
    workers = desk.ledger.workers
    return sum(workers[w].in_flight for w in {candidate.prefill_worker, candidate.decode_worker})


def fewest_in_flight(desk: Desk, candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the least busy workers; ties to the lowest ids."""
    return min(candidates, key=lambda c: (in_flight(desk, c), *ids(c)))


def uncached(desk: Desk, candidate: Candidate, request: GenerateRequest) -> int:
    """U in tokens, on the worker that would prefill."""
    return desk.uncached(desk.ledger.workers[candidate.prefill_worker], request)


def hit_share(desk: Desk, candidate: Candidate, request: GenerateRequest) -> float:
    """Share of the prompt that the prefill worker is taken to have: 0 to 1."""
    hit_tokens = request.prompt_tokens - uncached(desk, candidate, request)
    return max(0, hit_tokens) / max(1, request.prompt_tokens)


def lmetric(desk: Desk, candidate: Candidate, request: GenerateRequest) -> int:
    """Prompt tokens that would wait for prefill, times requests that would run."""
    workers = desk.ledger.workers
    waiting_tokens = workers[candidate.prefill_worker].pending_prefill_tokens
    tokens = waiting_tokens + uncached(desk, candidate, request)
    return tokens * (workers[candidate.decode_worker].in_flight + 1)


def kv_use(desk: Desk, worker_id: str) -> float:
    """Share of a worker's KV that is held or promised to prompts; 0 where its size is unknown."""
    account = desk.ledger.workers[worker_id]
    room_tokens = account.snapshot.kv_capacity_tokens
    return min(1.0, account.kv_soon_tokens / room_tokens) if room_tokens else 0.0
