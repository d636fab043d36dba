"""Roles for workers nobody has given any, from what probing found: pairs and speeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import sqrt

from splitserve.messages import Role, WorkerSnapshot
from splitserve.pairing import why_not_pair

LEAST_SPREAD = 2.0
"""Leanings closer than this are the noise of two short measurements."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One direction of two workers. `why_not` is "" when `prefill` can hand over to `decode`."""

    prefill: str
    decode: str
    why_not: str


def pairs(workers: Sequence[WorkerSnapshot]) -> list[Pair]:
    """Return every ordered pair of different workers."""
    return [
        Pair(p.worker_id, d.worker_id, why_not_pair(p, d) or _why_not_together(p, d))
        for p, d in permutations(workers, 2)
    ]


def suggest_roles(workers: Sequence[WorkerSnapshot]) -> dict[str, Role]:
    """Return a role for each worker id.

    Within a set of workers that can exchange KV, those that are fast at prefill for how fast they
    decode prefill, and the others decode. Where speeds are equal or unknown the role is `auto`,
    and the planner finds out. A worker that can exchange KV with nobody serves whole requests. A
    role that the engine was started with stands.
    """
    fitting = {(pair.prefill, pair.decode) for pair in pairs(workers) if not pair.why_not}
    roles: dict[str, Role] = {}
    for group in _groups(workers, fitting):
        roles |= _roles_within(group)
        for worker in group:
            if not worker.splits_only and not _has_partner(worker.worker_id, roles, fitting):
                roles[worker.worker_id] = Role.AGGREGATED
    return {worker.worker_id: roles[worker.worker_id] for worker in workers}


def leaning(worker: WorkerSnapshot) -> float:
    """Return prompt tokens prefilled in the time of one decoded token; 0 for unknown speeds."""
    known = worker.prefill_tok_s > 0 and worker.decode_tok_s > 0
    return worker.prefill_tok_s / worker.decode_tok_s if known else 0.0


def _why_not_together(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> str:
    if set(prefill.models) & set(decode.models):
        return ""
    names = (", ".join(worker.models) for worker in (prefill, decode))
    return f"no model has the same name on both ({' / '.join(names)}); set model and engine_model"


def _roles_within(group: Sequence[WorkerSnapshot]) -> dict[str, Role]:
    roles = {w.worker_id: w.role for w in group}
    free = sorted((w for w in group if not _declared(w)), key=leaning)
    if not free:
        return roles
    least, most = leaning(free[0]), leaning(free[-1])
    taken = {w.role for w in group if _declared(w)}
    if least == 0 or (most < LEAST_SPREAD * least and not taken):
        return roles | dict.fromkeys((w.worker_id for w in free), Role.AUTO)
    middle = sqrt(least * most)
    for worker in free:
        roles[worker.worker_id] = Role.PREFILL if leaning(worker) > middle else Role.DECODE
    if Role.DECODE not in roles.values():
        roles[free[0].worker_id] = Role.DECODE
    if Role.PREFILL not in roles.values():
        roles[free[-1].worker_id] = Role.PREFILL
    return roles


def _declared(worker: WorkerSnapshot) -> bool:
    return worker.role in (Role.PREFILL, Role.DECODE)


def _has_partner(worker_id: str, roles: dict[str, Role], fitting: set[tuple[str, str]]) -> bool:
    """Whether some worker in the other role, or in either, takes from it or gives to it."""
    gives = roles[worker_id] is not Role.DECODE and any(
        p == worker_id and roles.get(d) in (Role.DECODE, Role.AUTO) for p, d in fitting
    )
    takes = roles[worker_id] is not Role.PREFILL and any(
        d == worker_id and roles.get(p) in (Role.PREFILL, Role.AUTO) for p, d in fitting
    )
    return gives or takes


def _groups(
    workers: Sequence[WorkerSnapshot], fitting: set[tuple[str, str]]
) -> Iterator[list[WorkerSnapshot]]:
    """Yield the sets of workers that pairs connect."""
    left = {worker.worker_id: worker for worker in workers}
    while left:
        pending = [next(iter(left))]
        group = []
        while pending:
            worker_id = pending.pop()
            if worker_id in left:
                group.append(left.pop(worker_id))
                pending += [other for pair in fitting if worker_id in pair for other in pair]
        yield group
