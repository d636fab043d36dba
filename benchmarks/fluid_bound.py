"""An upper bound on attainment that no scheduler can pass: work as a fluid, in bins of one second.

max sum x_r over requests, 0 <= x_r <= 1: request r is served to the share x_r. Its prefill takes
x_r (p U + q U^2 / 2) seconds of a worker somewhere between its arrival and its TTFT target, its
decode x_r (n (b + c ctx) + a n ctx / cap) between its arrival and the end that its TPOT target
allows, ctx = prompt + n / 2: a step is shared by at most cap / ctx sequences. In no bin is more
done than there are workers. A relaxation: valid, but loose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from splitserve.performance.coefficients import Coefficients, area
from splitserve.simulation.trace import TraceRequest
from splitserve.simulation.world import World

_FOREVER_S = 3600.0  # where a request has no target


@dataclass(slots=True)
class _Matrix:
    """Entries of a sparse matrix."""

    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def put(self, row: int, column: int, value: float) -> None:
        self.rows.append(row)
        self.columns.append(column)
        self.values.append(value)

    def sparse(self, rows: int, columns: int) -> coo_matrix:
        return coo_matrix((self.values, (self.rows, self.columns)), shape=(rows, columns))


def fluid_bound(trace: Sequence[TraceRequest], world: World, scored_s: float) -> float:
    """Largest share of the requests with targets that arrive in [0, scored_s) that could be good.

    Work is priced for the fastest worker; a slower one counts as what it is of that one, by its
    least slow coefficient.
    """
    wanted = [r for r in trace if not r.batch and r.at_s < scored_s]
    fastest = min((w.coefficients for w in world.workers), key=lambda c: c.per_prompt_token_s)
    workers = sum(_share(w.coefficients, fastest) for w in world.workers)
    cap_tokens = max(w.shape.kv_tokens for w in world.workers)
    demands, capacity = _Matrix(), _Matrix()
    column = len(wanted)  # x_r first, then the work of each request in each of its bins
    for number, request in enumerate(wanted):
        for phase, (work_s, until_s) in enumerate(_phases(request, fastest, cap_tokens)):
            row = 2 * number + phase
            demands.put(row, number, -work_s)
            for second in range(int(request.at_s), math.floor(until_s) + 1):
                demands.put(row, column, 1.0)
                capacity.put(second, column, 1.0)
                column += 1
    bins = max(capacity.rows) + 1
    objective = np.zeros(column)
    objective[: len(wanted)] = -1.0
    upper = np.full(column, np.inf)
    upper[: len(wanted)] = 1.0
    solved = linprog(
        objective,
        A_ub=capacity.sparse(bins, column),
        b_ub=np.full(bins, workers),
        A_eq=demands.sparse(2 * len(wanted), column),
        b_eq=np.zeros(2 * len(wanted)),
        bounds=np.column_stack([np.zeros(column), upper]),
        method="highs",
    )
    if not solved.success:
        raise RuntimeError(f"the fluid bound was not solved: {solved.message}")
    return float(-solved.fun / len(wanted))


def _phases(
    request: TraceRequest, speed: Coefficients, cap_tokens: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of work and the time by which they are due: of the prompt, and of the answer."""
    prompt, output = request.prompt_tokens, request.output_tokens
    slo = request.slo
    first_s = request.at_s + (_FOREVER_S if slo.ttft_s is None else slo.ttft_s)
    last_s = first_s + output * (_FOREVER_S if slo.tpot_s is None else slo.tpot_s)
    held = prompt + output / 2
    prefill_s = speed.per_prompt_token_s * prompt + speed.per_prompt_token2_s * area(prompt, 0)
    token_s = speed.per_sequence_s + (speed.per_kv_token_s + speed.step_s / cap_tokens) * held
    return (prefill_s, first_s), (output * token_s, last_s)


def _share(speed: Coefficients, fastest: Coefficients) -> float:
    pairs = (
        (fastest.step_s, speed.step_s),
        (fastest.per_sequence_s, speed.per_sequence_s),
        (fastest.per_kv_token_s, speed.per_kv_token_s),
        (fastest.per_prompt_token_s, speed.per_prompt_token_s),
        (fastest.per_prompt_token2_s, speed.per_prompt_token2_s),
    )
    return max((best / own for best, own in pairs if own > 0), default=1.0)
