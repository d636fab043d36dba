"""Policies choose among priced plans. Each is named by what it prefers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.ledger import Ledger


class Policy(Protocol):
    """Picks one feasible plan, or None to let the request wait.

    `candidates` are all plans with their prices and reasons; `ledger` is what every worker has
    been given. A policy must not keep a clock or draw random numbers.
    """

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], ledger: Ledger
    ) -> Candidate | None: ...
