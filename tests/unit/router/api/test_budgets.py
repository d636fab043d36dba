"""Token buckets of tenants, on a clock that a test sets."""

from __future__ import annotations

import pytest

from router.api.budgets import Budgets
from router.api.errors import ApiError
from router.sections import Tenant
from router.telemetry.records import Record
from splitserve.messages import GenerateRequest

TENANTS = (
    Tenant(name="alice", key_env="A", tokens_per_minute=600),
    Tenant(name="bob", key_env="B", tokens_per_minute=600),
    Tenant(name="free", key_env="F"),
)


class Clock:
    now_s = 50.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def budgets(clock: Clock) -> Budgets:
    return Budgets(TENANTS, clock)


def record(prompt: int | None, output: int, attempts: int = 1) -> Record:
    made = Record(GenerateRequest("r", "m", 100), 0.0, 0.0)
    made.prompt_tokens, made.output_tokens, made.attempts = prompt, output, attempts
    return made


def refused(budgets: Budgets, tokens: int, tenant: str = "alice") -> ApiError:
    with pytest.raises(ApiError) as caught:
        budgets.admit(tenant, tokens)
    return caught.value


def test_a_minutes_worth_is_there_at_once_and_comes_back_in_a_minute(
    budgets: Budgets, clock: Clock
) -> None:
    for _ in range(6):
        budgets.admit("alice", 100)
    error = refused(budgets, 100)
    assert (error.status, error.code, error.retry_after_s) == (429, "budget_used", 10)
    assert error.message.startswith("tenant alice has used its budget of 600 tokens per minute; ")
    budgets.admit("bob", 100)  # another's budget is another's
    clock.now_s += 9.9
    assert refused(budgets, 100).retry_after_s == 1
    clock.now_s += 0.1
    budgets.admit("alice", 100)
    clock.now_s += 3600
    for _ in range(6):  # what is not used does not pile up
        budgets.admit("alice", 100)
    refused(budgets, 100)


def test_an_answer_is_charged_at_its_end_and_may_leave_a_debt(
    budgets: Budgets, clock: Clock
) -> None:
    budgets.admit("alice", 500)
    budgets.settle("alice", 500, record(prompt=400, output=260))
    assert refused(budgets, 1).retry_after_s == 7  # 660 of 600, at 10 a second
    clock.now_s += 6.1
    budgets.admit("alice", 1)


def test_the_engines_count_replaces_the_estimate(budgets: Budgets) -> None:
    budgets.admit("alice", 600)
    budgets.settle("alice", 600, record(prompt=100, output=0))
    budgets.admit("alice", 500)


def test_where_nobody_counted_the_estimate_stands(budgets: Budgets) -> None:
    budgets.admit("alice", 600)
    budgets.settle("alice", 600, record(prompt=None, output=0))
    refused(budgets, 1)


def test_what_was_never_started_costs_nothing(budgets: Budgets) -> None:
    budgets.admit("alice", 600)
    budgets.settle("alice", 600, record(prompt=None, output=0, attempts=0))
    budgets.admit("alice", 600)


def test_a_prompt_larger_than_a_minutes_worth_needs_a_full_bucket(
    budgets: Budgets, clock: Clock
) -> None:
    budgets.admit("alice", 1800)
    assert refused(budgets, 1800).retry_after_s == 180
    clock.now_s += 180
    budgets.admit("alice", 1800)


@pytest.mark.parametrize("tenant", ["free", "", "nobody"])
def test_no_limit_is_no_limit(budgets: Budgets, tenant: str) -> None:
    for _ in range(100):
        budgets.admit(tenant, 10**9)
    budgets.settle(tenant, 10**9, record(prompt=10**9, output=10**9))
