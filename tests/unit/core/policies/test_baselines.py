"""Each baseline's rule, on fleets made by hand: the exact worker it must take."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from splitserve import messages as m
from splitserve.scheduling import policies
from splitserve.scheduling.policies.cache_aware import CacheAware
from splitserve.scheduling.policies.capped import Capped
from splitserve.scheduling.policies.dynamo import Dynamo, block_cost
from splitserve.scheduling.policies.edf import EarliestDeadline
from splitserve.scheduling.policies.least_requests import LeastRequests
from splitserve.scheduling.policies.llm_d import LlmD
from splitserve.scheduling.policies.lmetric import LMetric
from splitserve.scheduling.policies.power_of_two import PowerOfTwo
from splitserve.scheduling.policies.random_worker import RandomWorker
from splitserve.scheduling.policies.round_robin import RoundRobin
from splitserve.scheduling.policies.silo import Silo
from splitserve.scheduling.policies.static_pd import StaticPD

# The fixtures' own types live in conftest.py, which cannot be imported by name.
Fleet = Any
Whole = Callable[..., Any]
Ask = Callable[..., m.GenerateRequest]

BATCH = m.Slo(deadline_s=86_400.0)
CHAT = m.Slo(ttft_s=1.0, tpot_s=0.05)
OURS = {"slack", "pricing", "eligible", "refusals", "immediate", "catalog", "shortlist"}


def test_no_baseline_is_longer_than_forty_lines() -> None:
    found = {}
    for path in Path(policies.__path__[0]).glob("*.py"):
        if path.stem in OURS:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.end_lineno is not None:
                found[node.name] = node.end_lineno - node.lineno + 1
    assert {"RoundRobin", "Dynamo", "CacheAware", "Silo"} <= set(found)
    assert {name: lines for name, lines in found.items() if lines > 40} == {}


# --- counting -------------------------------------------------------------------------------------


def test_round_robin_takes_turns_however_busy(whole_fleet: Whole) -> None:
    fleet, policy = whole_fleet("a", "b", "c"), RoundRobin()
    fleet.load("a", 50)
    assert fleet.choices(policy, 4) == "a b c a"


def test_round_robin_skips_a_full_worker_and_makes_up_for_it(whole_fleet: Whole) -> None:
    fleet, policy = whole_fleet("a", "b", "c"), RoundRobin()
    fleet.report("b", max_running=0)
    assert fleet.choices(policy, 4) == "a c a c"
    fleet.report("b")
    fleet.report("z")
    assert fleet.choices(policy, 4) == "b z a c"


def test_round_robin_turns_prefill_and_decode_workers_apart(split_fleet: Fleet) -> None:
    split_fleet.report("d3", m.Role.DECODE)
    assert split_fleet.choices(RoundRobin(), 4) == "p1>d1 p2>d2 p1>d3 p2>d1"


def test_least_requests_counts_and_breaks_ties_by_id(whole_fleet: Whole) -> None:
    fleet = whole_fleet("c", "a", "b")
    fleet.load("a", 2)
    fleet.load("b", 1)
    fleet.load("c", 1, prompt_tokens=9000, pending=True)
    assert fleet.choose(LeastRequests()) == "b"
    fleet.load("b", 1)
    assert fleet.choose(LeastRequests()) == "c"


def test_least_requests_counts_both_ends_of_a_split(split_fleet: Fleet) -> None:
    split_fleet.load("p1", 3, pending=True)
    split_fleet.load("d1", 1)
    assert split_fleet.choose(LeastRequests()) == "p2>d2"


@pytest.mark.parametrize(
    "policy", [LeastRequests(), LMetric(), RoundRobin(), LlmD(), CacheAware(), Dynamo(), Capped()]
)
def test_who_knows_no_split_serves_whole_where_he_may(mixed_fleet: Fleet, policy: Any) -> None:
    mixed_fleet.load("a", 9)
    mixed_fleet.load("b", 10)
    assert mixed_fleet.choose(policy) == "a"


def test_power_of_two_takes_the_less_busy_of_the_two_drawn(whole_fleet: Whole) -> None:
    fleet = whole_fleet("a", "b", "c")
    fleet.load("a", 1)
    fleet.load("b", 2)
    drawn = fleet.choices(PowerOfTwo(7), 300).split()
    assert drawn.count("b") == 0, "the busiest of three is never the better of two"
    assert 0.55 < drawn.count("c") / 300 < 0.78  # two of three pairs have it
    assert drawn == fleet.choices(PowerOfTwo(7), 300).split()
    assert drawn != fleet.choices(PowerOfTwo(8), 300).split()


def test_power_of_two_with_one_worker(whole_fleet: Whole) -> None:
    assert whole_fleet("a").choose(PowerOfTwo()) == "a"


def test_random_is_uniform_and_repeats_itself(whole_fleet: Whole) -> None:
    fleet = whole_fleet("a", "b", "c")
    fleet.load("a", 99)
    drawn = fleet.choices(RandomWorker(3), 300).split()
    assert all(70 <= drawn.count(worker) <= 130 for worker in "abc")
    assert drawn == fleet.choices(RandomWorker(3), 300).split()


def test_lmetric_multiplies_waiting_tokens_by_batch(whole_fleet: Whole, request_of: Ask) -> None:
    fleet = whole_fleet("a", "b")
    fleet.load("a", 1, prompt_tokens=1000, pending=True)  # (1000 + 100) * 2 = 2200
    fleet.load("b", 20)  # 100 * 21 = 2100
    assert fleet.choose(LMetric(), request_of(100)) == "b"
    fleet.load("b", 1)  # 100 * 22 = 2200: a tie, to the lowest id
    assert fleet.choose(LMetric(), request_of(100)) == "a"


def test_lmetric_counts_only_uncached_tokens(whole_fleet: Whole, request_of: Ask) -> None:
    fleet = whole_fleet("a", "b")
    fleet.load("b", 3)
    fleet.desk.prefix.add("b", (1, 2, 3))
    prompt = request_of(2048, block_hashes=(1, 2, 3, 4))
    assert fleet.choose(LMetric(), prompt) == "a"  # 2048 * 1 = 512 * 4: a tie
    fleet.load("a", 1)
    assert fleet.choose(LMetric(), prompt) == "b"  # 2048 * 2 > 512 * 4


# --- caches ---------------------------------------------------------------------------------------


def test_cache_aware_needs_more_than_three_tenths(whole_fleet: Whole, request_of: Ask) -> None:
    hashes = tuple(range(10))
    for blocks, expected in ((3, "a"), (4, "b")):
        fleet = whole_fleet("a", "b")
        fleet.load("b", 10)
        fleet.desk.prefix.add("b", hashes[:blocks])
        assert fleet.choose(CacheAware(), request_of(5120, block_hashes=hashes)) == expected


def test_cache_aware_without_a_match_takes_the_smallest_tree(
    whole_fleet: Whole, request_of: Ask
) -> None:
    fleet, policy = whole_fleet("a", "b"), CacheAware()
    sizes = (1000, 300, 300, 300, 300, 1)
    chosen = [fleet.choose(policy, request_of(size)) for size in sizes]
    # trees: a 1000; b 300, 600, 900, 1200; then a is the smaller again
    assert chosen == ["a", "b", "b", "b", "b", "a"]


def test_cache_aware_gives_up_on_the_cache_when_loads_drift_apart(
    whole_fleet: Whole, request_of: Ask
) -> None:
    hashes = (1, 2)
    prompt = request_of(1024, block_hashes=hashes)
    for loads, expected in (((0, 64), "b"), ((0, 65), "a"), ((200, 300), "b"), ((199, 300), "a")):
        fleet = whole_fleet("a", "b", kv_tokens=0)
        fleet.load("a", loads[0])
        fleet.load("b", loads[1])
        fleet.desk.prefix.add("b", hashes)
        assert fleet.choose(CacheAware(), prompt) == expected, loads


def test_llm_d_adds_queue_kv_and_prefix(whole_fleet: Whole, request_of: Ask) -> None:
    fleet = whole_fleet("a", "b", "c", kv_tokens=10_000)
    fleet.load("a", 2, prompt_tokens=100, pending=True)  # 2 * 0 + 2 * 0.98 = 1.96
    fleet.load("b", 1, prompt_tokens=4000)  # 2 * 1 + 2 * 0.6 = 3.2
    fleet.load("c", 1, prompt_tokens=100, pending=True)  # 2 * 0.5 + 2 * 0.99 = 2.98
    prompt = request_of(2048, block_hashes=(1, 2, 3, 4))
    assert fleet.choose(LlmD(), prompt) == "b"
    fleet.desk.prefix.add("c", (1,))  # + 3 / 4 = 3.73
    assert fleet.choose(LlmD(), prompt) == "c"
    fleet.desk.prefix.add("a", (1, 2, 3))  # + 9 / 4 = 4.21
    assert fleet.choose(LlmD(), prompt) == "a"


def test_dynamo_counts_blocks_to_compute_and_to_hold(whole_fleet: Whole, request_of: Ask) -> None:
    fleet = whole_fleet("a", "b")
    fleet.load("a", 1, prompt_tokens=320, pending=True)  # 20 + 10, and 20 + 10 to hold
    fleet.load("b", 1, prompt_tokens=639)  # 10, and 40 + 10 to hold
    prompt = request_of(160)
    costs = {c.decode_worker: block_cost(fleet.desk, c, prompt) for c in fleet.plans(prompt)}
    assert costs == {"a": 60.0, "b": 60.0}
    drawn = [fleet.choose(policy, prompt) for policy in [Dynamo(seed=5)] for _ in range(40)]
    assert set(drawn) == {"a", "b"}
    fleet.load("b", 1, prompt_tokens=1)
    assert fleet.choose(Dynamo(), prompt) == "a"


def test_dynamo_takes_hits_off_what_is_to_compute(whole_fleet: Whole, request_of: Ask) -> None:
    fleet = whole_fleet("a", "b")
    fleet.load("b", 1, prompt_tokens=500)  # 32 blocks to hold
    fleet.desk.prefix.add("b", (1,))  # 32 blocks less to compute
    prompt = request_of(1024, block_hashes=(1, 2))
    costs = {c.decode_worker: block_cost(fleet.desk, c, prompt) for c in fleet.plans(prompt)}
    assert costs == {"a": 128.0, "b": 128.0}


def test_dynamo_prices_its_two_pools_apart(split_fleet: Fleet) -> None:
    split_fleet.load("p1", 1, prompt_tokens=160, pending=True)
    split_fleet.load("p2", 9, prompt_tokens=900)  # what a prefill worker holds counts for nothing
    split_fleet.load("d1", 1, prompt_tokens=320)
    split_fleet.load("d2", 5, prompt_tokens=16)
    assert split_fleet.choose(Dynamo()) == "p2>d2"


# --- splitting ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "threshold_tokens,prompt_tokens,expected",
    [
        (256, 255, "a"),
        (256, 256, "b>a"),
        (1000, 999, "a"),
        (1000, 1000, "b>a"),
        (2048, 2047, "a"),
        (4096, 4096, "b>a"),
        (0, 1, "b>a"),
    ],
)
def test_a_threshold_splits_from_its_value_on(
    mixed_fleet: Fleet,
    request_of: Ask,
    threshold_tokens: int,
    prompt_tokens: int,
    expected: str,
) -> None:
    mixed_fleet.load("a", 1, prompt_tokens=50, pending=True)
    mixed_fleet.load("b", 1, prompt_tokens=60)
    if expected == "a":
        mixed_fleet.load("b", 5)  # LMetric: (50 + U) * 2 < U * 7 for every U here
    prompt = request_of(prompt_tokens)
    assert mixed_fleet.choose(StaticPD(threshold_tokens), prompt) == expected


def test_a_threshold_counts_only_uncached_tokens(mixed_fleet: Fleet, request_of: Ask) -> None:
    prompt = request_of(2048, block_hashes=(1, 2, 3, 4))
    assert mixed_fleet.choose(StaticPD(1000), prompt) == "a>b"
    mixed_fleet.desk.prefix.add("b", (1, 2, 3))
    assert mixed_fleet.choose(StaticPD(1000), prompt) == "b"


def test_always_local_and_always_remote(mixed_fleet: Fleet, request_of: Ask) -> None:
    assert mixed_fleet.choose(StaticPD.never(), request_of(100_000)) == "a"
    assert mixed_fleet.choose(StaticPD(), request_of(1)) == "a>b"


def test_a_threshold_yields_to_what_the_fleet_can_do(
    split_fleet: Fleet, whole_fleet: Whole, request_of: Ask
) -> None:
    assert split_fleet.choose(StaticPD.never(), request_of(10)) == "p1>d1"
    assert whole_fleet("a", "b").choose(StaticPD(), request_of(10_000)) == "a"


def test_static_pools_take_pending_tokens_then_held_ones(split_fleet: Fleet) -> None:
    split_fleet.load("p1", 1, prompt_tokens=500, pending=True)
    split_fleet.load("p2", 3, prompt_tokens=100, pending=True)
    split_fleet.load("d1", 1, prompt_tokens=900)
    split_fleet.load("d2", 4, prompt_tokens=100)
    assert split_fleet.choose(StaticPD()) == "p2>d2"


def test_dynamo_splits_unless_little_is_left_to_prefill(
    mixed_fleet: Fleet, request_of: Ask
) -> None:
    cold, warm = request_of(1024, block_hashes=(1, 2)), request_of(1024, block_hashes=(8, 9))
    mixed_fleet.desk.prefix.add("a", (8,))
    mixed_fleet.load("a", 1)
    assert mixed_fleet.choose(Dynamo(), cold) == "b"
    assert mixed_fleet.choose(Dynamo(pools=True), cold) == "a>b"
    assert mixed_fleet.choose(Dynamo(pools=True), warm) == "a"
    assert mixed_fleet.choose(Dynamo(pools=True, local_tokens=512), warm) == "a>b"
    assert mixed_fleet.choose(Dynamo(pools=True, local_share=0.5), warm) == "a>b"


# --- queues ---------------------------------------------------------------------------------------


def test_capped_waits_when_every_worker_is_at_its_cap(whole_fleet: Whole) -> None:
    fleet = whole_fleet("a", "b")
    fleet.load("a", 2)
    fleet.load("b", 1)
    assert fleet.choose(Capped(2)) == "b"
    fleet.load("b", 1)
    assert fleet.choose(Capped(2)) == "-"
    assert fleet.choose(Capped(3)) == "a"


def test_capped_counts_both_ends_of_a_split(split_fleet: Fleet) -> None:
    split_fleet.load("p1", 2)
    split_fleet.load("d2", 2)
    assert split_fleet.choose(Capped(2)) == "p2>d1"
    split_fleet.load("d1", 2)
    assert split_fleet.choose(Capped(2)) == "-"


def test_capped_tries_batch_last(whole_fleet: Whole, request_of: Ask) -> None:
    fleet = whole_fleet("a")
    for at_s, (name, slo) in enumerate([("b1", BATCH), ("c1", CHAT), ("b2", BATCH), ("c2", CHAT)]):
        fleet.wait(request_of(request_id=name, slo=slo), float(at_s))
    assert _order(Capped(), fleet) == ["c1", "c2", "b1", "b2"]
    assert _order(LeastRequests(), fleet) == ["b1", "c1", "b2", "c2"]


def test_edf_orders_by_deadline_not_by_arrival(whole_fleet: Whole, request_of: Ask) -> None:
    fleet = whole_fleet("a")
    fleet.wait(request_of(request_id="loose", slo=m.Slo(ttft_s=9.0)), 0.0)
    fleet.wait(request_of(request_id="none"), 0.5)
    fleet.wait(request_of(request_id="batch", slo=BATCH), 0.6)
    fleet.wait(request_of(request_id="tight", slo=m.Slo(ttft_s=1.0)), 2.0)
    assert _order(EarliestDeadline(), fleet) == ["tight", "loose", "batch", "none"]
    fleet.load("a", 3)
    assert fleet.choose(EarliestDeadline()) == "a"


def test_silo_keeps_the_bands_apart(whole_fleet: Whole, request_of: Ask) -> None:
    fleet, policy = whole_fleet("a", "b", "c"), Silo()
    chat, batch = request_of(slo=CHAT), request_of(slo=BATCH)
    fleet.load("a", 2)
    fleet.load("b", 5)
    assert (fleet.choose(policy, chat), fleet.choose(policy, batch)) == ("a", "c")
    fleet.load("c", 50)
    assert fleet.choose(policy, batch) == "c"
    fleet.report("c", max_running=50)
    assert (fleet.choose(policy, chat), fleet.choose(policy, batch)) == ("a", "-")


def test_silo_with_one_worker_shares_it(whole_fleet: Whole, request_of: Ask) -> None:
    fleet = whole_fleet("a")
    assert fleet.choose(Silo(), request_of(slo=CHAT)) == "a"
    assert fleet.choose(Silo(), request_of(slo=BATCH)) == "a"


def test_silo_with_roles_keeps_a_decode_worker(split_fleet: Fleet, request_of: Ask) -> None:
    assert split_fleet.choose(Silo(), request_of(slo=CHAT)) == "p1>d1"
    assert split_fleet.choose(Silo(), request_of(slo=BATCH)) == "p1>d2"


def test_waiting_batch_of_a_silo_holds_nobody_up(whole_fleet: Whole, request_of: Ask) -> None:
    fleet, policy = whole_fleet("a", "z"), Silo()
    fleet.report("z", max_running=0)
    for name, slo in (("b1", BATCH), ("b2", BATCH), ("c1", CHAT)):
        fleet.wait(request_of(request_id=name, slo=slo), 0.0)
    policy.pump(fleet.desk, 0.1)
    assert list(fleet.desk.waiting) == ["b1", "b2"]


def _order(policy: LeastRequests | Capped, fleet: Fleet) -> list[str]:
    return [f.request.request_id for f in policy.order(fleet.desk, 3.0)]
