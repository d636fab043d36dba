"""Non-negative least squares over three variables, fed one sample at a time.

Decayed normal equations A <- lambda A + x x^T / yhat^2, v <- lambda v + x y / yhat^2 weigh errors
relative to what was predicted and forget old samples. The solution is exact: of the seven non-empty
supports of three variables, the best one whose coefficients are all non-negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

Vector = tuple[float, float, float]

FORGETTING = 0.998
PRIOR_WEIGHT = 0.3
_SUPPORTS = tuple(support for size in (3, 2, 1) for support in combinations(range(3), size))
_TINY = 1e-300


@dataclass(slots=True)
class NonNegativeFit:
    """y = theta . x with theta >= 0, started from `theta` as pseudo-observations that decay too.

    `solve_every` samples the coefficients are solved anew; between, the last ones hold.
    """

    theta: Vector
    forgetting: float = FORGETTING
    solve_every: int = 10
    samples: int = 0
    _a: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _v: list[float] = field(default_factory=lambda: [0.0] * 3)

    def __post_init__(self) -> None:
        for i, prior in enumerate(self.theta):
            if prior > 0:
                self._a[i][i] = PRIOR_WEIGHT / prior**2
                self._v[i] = self._a[i][i] * prior

    def predict(self, x: Vector) -> float:
        """Return theta . x."""
        return self.theta[0] * x[0] + self.theta[1] * x[1] + self.theta[2] * x[2]

    def see(self, x: Vector, y: float) -> None:
        """Take in one sample."""
        weight = 1.0 / max(self.predict(x), 1e-9) ** 2
        for i in range(3):
            row, xi = self._a[i], x[i] * weight
            for j in range(3):
                row[j] = self.forgetting * row[j] + xi * x[j]
            self._v[i] = self.forgetting * self._v[i] + xi * y
        self.samples += 1
        if self.samples % self.solve_every == 0:
            self.theta = solve(self._a, self._v) or self.theta


def solve(a: list[list[float]], v: list[float]) -> Vector | None:
    """Minimise theta^T A theta - 2 v^T theta over theta >= 0; None when nothing is determined."""
    best: Vector | None = None
    best_cost = 0.0  # theta = 0
    for support in _SUPPORTS:
        part = _solve_on(a, v, support)
        if part is None or min(part) < 0:
            continue
        cost = -sum(v[i] * value for i, value in zip(support, part, strict=True))
        if cost < best_cost:
            full = [0.0, 0.0, 0.0]
            for i, value in zip(support, part, strict=True):
                full[i] = value
            best, best_cost = (full[0], full[1], full[2]), cost
    return best


def _solve_on(a: list[list[float]], v: list[float], support: tuple[int, ...]) -> list[float] | None:
    """Solve the normal equations restricted to `support`, scaled to a unit diagonal."""
    scale = [a[i][i] ** 0.5 for i in support]
    if min(scale) <= _TINY:
        return None
    size = len(support)
    rows = [
        [a[i][j] / (scale[r] * scale[c]) for c, j in enumerate(support)] + [v[i] / scale[r]]
        for r, i in enumerate(support)
    ]
    for column in range(size):
        pivot = max(range(column, size), key=lambda r: abs(rows[r][column]))
        if abs(rows[pivot][column]) < 1e-9:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for r in range(column + 1, size):
            factor = rows[r][column] / rows[column][column]
            for c in range(column, size + 1):
                rows[r][c] -= factor * rows[column][c]
    found = [0.0] * size
    for r in reversed(range(size)):
        rest = sum(rows[r][c] * found[c] for c in range(r + 1, size))
        found[r] = (rows[r][size] - rest) / rows[r][r]
    return [value / scale[r] for r, value in enumerate(found)]
