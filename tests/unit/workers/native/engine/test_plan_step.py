"""Who gets rows of the next step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from workers.native.engine.batch import plan_step


@dataclass
class Waiting:
    """What planning reads of a sequence."""

    name: str
    remaining: int
    priority: int = 0
    prompt_logprobs: int | None = None


def rows(*running: Waiting, budget: int = 512, patient: int | None = 32) -> list[tuple[str, int]]:
    slices = plan_step(cast(Any, running), budget, patient)
    return [(cast(Any, piece.sequence).name, piece.rows) for piece in slices]


def test_decodes_come_first_and_count_against_the_budget() -> None:
    assert rows(Waiting("p", 100), Waiting("d", 1), budget=10) == [("d", 1), ("p", 9)]


def test_a_patient_prompt_alone_gets_no_more_than_its_piece() -> None:
    assert rows(Waiting("b", 400, priority=10)) == [("b", 32)]
    assert rows(Waiting("b", 400, priority=10), patient=None) == [("b", 400)]


def test_patient_prompts_share_one_piece() -> None:
    batch = [Waiting(name, 20, priority=10) for name in "abc"]
    assert rows(*batch) == [("a", 20), ("b", 12)]


def test_a_patient_prompt_waits_while_an_urgent_one_is_computed() -> None:
    assert rows(Waiting("b", 400, priority=10), Waiting("u", 50)) == [("u", 50)]


def test_patient_streams_decode_beside_urgent_prompts() -> None:
    assert rows(Waiting("b", 1, priority=10), Waiting("u", 50)) == [("b", 1), ("u", 50)]


def test_a_piece_never_exceeds_the_budget() -> None:
    assert rows(Waiting("b", 400, priority=10), budget=16) == [("b", 16)]
