"""Baselines that read predictions: headroom, patience, early refusal. Steps take 10 ms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from splitserve import messages as m
from splitserve.performance.coefficients import Coefficients
from splitserve.scheduling.policies.conductor import Conductor
from splitserve.scheduling.policies.least_load import LeastLoad
from splitserve.scheduling.policies.llm_d_slo import LlmDSlo
from splitserve.scheduling.policies.poly_serve import PolyServe
from splitserve.scheduling.policies.sticky import Sticky
from splitserve.scheduling.policies.trt_llm import TrtLlm

Whole = Callable[..., Any]
Ask = Callable[..., m.GenerateRequest]

# 10 ms a step and 1 ms more per stream, 1 ms a prompt token, no limit to a step
SPEED = Coefficients(0.010, 0.001, 0.0, 0.0, 0.001, 0.0, 1_000_000)


@pytest.fixture
def fleet(whole_fleet: Whole) -> Any:
    """Workers a, b and c, all of one speed."""
    found = whole_fleet()
    for worker_id in "abc":
        found.report(worker_id, coefficients=SPEED, exact=True)
    return found


def test_sticky_stays_where_four_fifths_are_cached(fleet: Any, request_of: Ask) -> None:
    prompt = request_of(5120, block_hashes=tuple(range(10)))
    fleet.load("b", 30)
    fleet.load("a", 1)
    fleet.desk.prefix.add("b", range(7))
    assert fleet.choose(Sticky(), prompt) == "c"
    fleet.desk.prefix.add("b", range(8))
    assert fleet.choose(Sticky(), prompt) == "b"


def test_sticky_loses_patience_after_eighteen_seconds(fleet: Any, request_of: Ask) -> None:
    prompt = request_of(1024, block_hashes=(1, 2))
    fleet.desk.prefix.add("b", (1, 2))
    fleet.load("b", 1, prompt_tokens=19_000, pending=True)  # 19.0 s, less 1.024 s elsewhere
    assert fleet.choose(Sticky(), prompt) == "b"
    fleet.load("b", 1, prompt_tokens=100, pending=True)
    assert fleet.choose(Sticky(), prompt) == "a"


def test_headroom_packs_tightly_but_in_time(fleet: Any, request_of: Ask) -> None:
    fleet.load("b", 1, prompt_tokens=300, pending=True)
    fleet.load("c", 1, prompt_tokens=900, pending=True)
    prompt = request_of(200, slo=m.Slo(ttft_s=1.0, tpot_s=0.1))
    picks = [fleet.choose(policy, prompt) for policy in [LlmDSlo(1)] for _ in range(1000)]
    assert set(picks) == {"b", "c"}, "b keeps the target most tightly; c does not keep it"
    assert 2 <= picks.count("c") <= 25, "one time in a hundred it tries a late one"


def test_headroom_with_nothing_in_time(fleet: Any, request_of: Ask) -> None:
    prompt = request_of(2000, slo=m.Slo(ttft_s=1.0, tpot_s=0.1))
    fleet.load("a", 1)
    fleet.load("b", 2)
    assert fleet.choose(LlmDSlo(), prompt) == "c", "an idle one first"
    fleet.load("c", 95)  # late in both
    assert fleet.choose(LlmDSlo(), prompt) == "a", "then the least late of those late in one"


def test_least_load_adds_queue_and_kv(fleet: Any) -> None:
    fleet.load("a", 1, prompt_tokens=2000, pending=True)  # 1.0 s
    fleet.load("b", 1, prompt_tokens=1799)  # 0.9 s, and 0.15 * 0.0183
    fleet.load("c", 2, prompt_tokens=1899)  # 1.9 s
    assert fleet.choose(LeastLoad()) == "b"
    fleet.report("b", coefficients=SPEED, exact=True, kv_capacity_tokens=2000)  # k 0.9: + 1.35 s
    assert fleet.choose(LeastLoad()) == "a"
    fleet.report("c", coefficients=SPEED, exact=True, prefill_tok_s=10_000.0)  # 0.38 s
    assert fleet.choose(LeastLoad()) == "c"


def test_trt_llm_trades_a_match_for_requests(fleet: Any, request_of: Ask) -> None:
    prompt = request_of(1024, block_hashes=(1, 2))
    fleet.desk.prefix.add("b", (1,))
    fleet.load("b", 31)  # 0.5 - 31 / 64
    assert fleet.choose(TrtLlm(), prompt) == "b"
    fleet.load("b", 2)
    assert fleet.choose(TrtLlm(), prompt) == "a"


def test_conductor_takes_the_soonest_first_token(fleet: Any, request_of: Ask) -> None:
    fleet.load("a", 1, prompt_tokens=900, pending=True)
    fleet.load("b", 1, prompt_tokens=500, pending=True)
    fleet.load("c", 3, prompt_tokens=200, pending=True)
    assert fleet.choose(Conductor()) == "b"


@pytest.mark.parametrize(
    "slo,at_s,refused",
    [
        (m.Slo(ttft_s=0.59), 0.0, True),
        (m.Slo(ttft_s=0.61), 0.0, False),
        (m.Slo(ttft_s=0.61), 0.05, True),  # a second attempt, after a failure
        (m.Slo(tpot_s=0.0119), 0.0, True),
        (m.Slo(tpot_s=0.0121), 0.0, False),
    ],
)
def test_conductor_refuses_what_is_late_everywhere(
    fleet: Any, request_of: Ask, slo: m.Slo, at_s: float, refused: bool
) -> None:
    for worker_id in "abc":  # the newcomer's first token: 0.4 + 0.2 s, a step then: 12 ms
        fleet.load(worker_id, 1, prompt_tokens=399, pending=True)
    request = request_of(200, slo=slo)
    fleet.wait(request, 0.0)
    flight = fleet.desk.flights[request.request_id] = fleet.desk.waiting[request.request_id]
    policy = Conductor()
    policy.arrived(flight, fleet.desk, at_s)
    policy.pump(fleet.desk, at_s)
    kinds = [type(c) for c in fleet.desk.commands]
    assert kinds == ([m.Reject] if refused else [m.StartAggregated])


def test_poly_serve_fills_one_worker_before_the_next(fleet: Any, request_of: Ask) -> None:
    fleet.load("b", 4)
    fleet.load("c", 9)
    assert fleet.choose(PolyServe(), request_of(slo=m.Slo(tpot_s=0.021))) == "c"
    assert fleet.choose(PolyServe(), request_of(slo=m.Slo(tpot_s=0.016))) == "b"
    assert fleet.choose(PolyServe(), request_of(slo=m.Slo(tpot_s=0.005))) == "a"
    assert fleet.choose(PolyServe(), request_of(slo=m.Slo(deadline_s=900.0))) == "a"
