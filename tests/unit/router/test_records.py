"""Decision records: what is kept of them is bounded."""

from __future__ import annotations

import pytest

from router.telemetry.records import Record, RecordStore
from splitserve.messages import Candidate, Choice, GenerateRequest, PlanKind, Slo
from splitserve.simulation.results import Outcome
from splitserve.simulation.trace import TraceRequest

TARGETS = Slo(ttft_s=1.0, tpot_s=0.1, deadline_s=5.0)


def record(name: str = "r", client_id: str = "") -> Record:
    return Record(GenerateRequest(name, "m", 1), 0.0, 0.0, client_id)


def candidate(number: int, why_not: str = "") -> Candidate:
    name = f"w{number}"
    return Candidate(PlanKind.AGGREGATED, name, name, float(number), 0.0, why_not=why_not)


def test_few_candidates_are_kept_as_they_are() -> None:
    choice = Choice((candidate(2), candidate(1)), None)
    story = record()
    story.keep(choice)
    assert story.choice is choice
    assert story.to_json()["candidates_left_out"] == 0


def test_of_many_candidates_the_chosen_and_the_soonest_feasible_are_kept() -> None:
    many = tuple(candidate(n, "full" if n < 50 else "") for n in range(1000))
    story = record()
    story.keep(Choice(many, many[999]))
    kept = [c.decode_worker for c in story.choice.candidates]
    assert kept == ["w999", *(f"w{n}" for n in range(50, 81))]
    assert story.choice.chosen is many[999]
    assert story.to_json()["candidates_left_out"] == 968


def test_oldest_is_forgotten_with_its_alias() -> None:
    store = RecordStore(limit=2)
    for number in range(4):
        store.add(record(f"r{number}", f"c{number % 3}"))
    assert len(store) == 2
    assert store.find("r1") is None
    assert store.find("c1") is None
    assert [r.request.request_id for r in store.latest(9)] == ["r3", "r2"]
    found = store.find("c0")
    assert found is not None
    assert found.request.request_id == "r3"


@pytest.mark.parametrize(
    "first_s,last_s,tokens,met",
    [(10.5, 11.0, 6, True), (11.5, 12.0, 6, False), (10.5, 16.0, 6, False), (10.5, 10.5, 1, True)],
)
def test_live_and_simulated_requests_meet_targets_alike(
    first_s: float, last_s: float, tokens: int, met: bool
) -> None:
    record = Record(GenerateRequest("r", "m", 10, slo=TARGETS), 0.0, 10.0)
    record.first_token_s, record.last_token_s = first_s, last_s
    record.output_tokens, record.finish = tokens, "done"
    outcome = Outcome(TraceRequest(10.0, 10, tokens, "c", TARGETS), 10.0)
    outcome.first_token_s, outcome.last_token_s, outcome.output_tokens = first_s, last_s, tokens
    assert record.met_targets is outcome.good is met
    record.finish = "cancelled"
    assert not record.met_targets
