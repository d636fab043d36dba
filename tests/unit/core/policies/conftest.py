"""A fleet made by hand: workers, what is booked on them, and one decision at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from splitserve import messages as m
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import Flight
from splitserve.scheduling.ledger import Booking, Phase
from splitserve.scheduling.plans import PlanTable
from splitserve.scheduling.policies.immediate import ImmediatePolicy


@dataclass
class Fleet:
    """Workers by id and role; all share one connector and one KV layout."""

    roles: dict[str, m.Role]
    linked: bool = True
    kv_tokens: int = 100_000
    desk: Desk = field(default_factory=Desk)
    booked: int = 0

    def __post_init__(self) -> None:
        for worker_id, role in self.roles.items():
            self.report(worker_id, role)

    def report(self, worker_id: str, role: m.Role = m.Role.AUTO, **more: object) -> None:
        values: dict[str, object] = {
            "connector": "native" if self.linked else "",
            "max_running": 1000,
            "kv_capacity_tokens": self.kv_tokens,
            **more,
        }
        snapshot = m.WorkerSnapshot(worker_id, role, "fake", ("m",), **values)  # type: ignore[arg-type]
        self.desk.ledger.report(snapshot)

    def load(
        self, worker_id: str, requests: int = 1, prompt_tokens: int = 16, *, pending: bool = False
    ) -> None:
        """Book requests that decode, or that still wait for their prefill."""
        account = self.desk.ledger.workers[worker_id]
        for _ in range(requests):
            self.booked += 1
            key = (f"load{self.booked}", 1, m.Leg.AGGREGATED)
            request = m.GenerateRequest(key[0], "m", prompt_tokens)
            account.book(key, Booking(request, Phase.PENDING, prompt_tokens, 0, prompt_tokens, 0.0))
            if not pending:
                account.first_token(key, 0.0)

    def clear(self, worker_id: str) -> None:
        account = self.desk.ledger.workers[worker_id]
        for key in list(account.bookings):
            account.unbook(key)

    def plans(self, request: m.GenerateRequest) -> list[m.Candidate]:
        return [c for c in PlanTable(self.desk).candidates(request) if c.feasible]

    def choose(self, policy: ImmediatePolicy, request: m.GenerateRequest | None = None) -> str:
        """Return the worker chosen, "prefill>decode" for a split, "-" for none."""
        request = request or ask()
        chosen = policy.choose(request, self.plans(request), self.desk)
        if chosen is None:
            return "-"
        if chosen.plan is m.PlanKind.AGGREGATED:
            return chosen.decode_worker
        return f"{chosen.prefill_worker}>{chosen.decode_worker}"

    def choices(self, policy: ImmediatePolicy, times: int) -> str:
        return " ".join(self.choose(policy) for _ in range(times))

    def wait(self, request: m.GenerateRequest, arrived_s: float) -> None:
        self.desk.waiting[request.request_id] = Flight(request, arrived_s)


def ask(prompt_tokens: int = 160, **more: object) -> m.GenerateRequest:
    name = str(more.pop("request_id", "r"))
    return m.GenerateRequest(name, "m", prompt_tokens, max_tokens=10, **more)  # type: ignore[arg-type]


@pytest.fixture
def whole_fleet() -> Callable[..., Fleet]:
    """Make workers that cannot hand over: `whole_fleet("a", "b")`."""
    return lambda *ids, **more: Fleet(dict.fromkeys(ids, m.Role.AUTO), linked=False, **more)


@pytest.fixture
def split_fleet() -> Fleet:
    """Two prefill workers and two decode workers."""
    role = m.Role
    return Fleet({"p1": role.PREFILL, "p2": role.PREFILL, "d1": role.DECODE, "d2": role.DECODE})


@pytest.fixture
def mixed_fleet() -> Fleet:
    """Two workers that do anything and hand over to each other."""
    return Fleet(dict.fromkeys(("a", "b"), m.Role.AUTO))


@pytest.fixture
def request_of() -> Callable[..., m.GenerateRequest]:
    return ask
