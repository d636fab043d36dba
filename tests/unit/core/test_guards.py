"""Each guard on accounts made by hand: the last request it lets in, the first it refuses.

Steps take 10 ms, a prompt token 1 ms, a step takes 100 tokens; lengths are known exactly.
"""

from __future__ import annotations

import math

import pytest

from splitserve import messages as m
from splitserve.performance.coefficients import Coefficients
from splitserve.performance.lengths import Lengths
from splitserve.performance.worker_model import WorkerModel
from splitserve.scheduling import Scheduler
from splitserve.scheduling.guards import Guards, GuardSettings
from splitserve.scheduling.ledger import Booking, Phase, WorkerAccount
from splitserve.scheduling.policies.slack import Slack

SPEED = Coefficients(0.010, 0.0, 0.0, 0.0, 0.001, 0.0, 100)
SLOWING = Coefficients(0.010, 0.001, 0.0, 0.0, 0.001, 0.0, 100)  # 1 ms a step per stream
OUTPUT_TOKENS = 21
NOW_S = 1.0
STREAM = "a running stream would miss its TPOT target"
WAITING = "a waiting prompt would miss its TPOT target"
SLOW = "a step would be slower than a TPOT target here"
OWN = "a step would be slower than the request's own limit"


class Bench:
    """One worker, its guards, and what is booked on it."""

    def __init__(
        self,
        speed: Coefficients = SPEED,
        kv_tokens: int = 0,
        output_tokens: int = OUTPUT_TOKENS,
        settings: GuardSettings | None = None,
    ) -> None:
        snapshot = m.WorkerSnapshot("w", m.Role.AUTO, "x", ("m",), kv_capacity_tokens=kv_tokens)
        self.account = WorkerAccount(snapshot, WorkerModel(speed, fixed=True))
        lengths = Lengths(lambda _: output_tokens)
        self.guards = Guards(lengths, settings or GuardSettings())

    def book(
        self, name: str, prompt_tokens: int, tpot_s: float | None, first_s: float | None = None
    ) -> None:
        """Book a prompt that waits, or (with `first_s`) a stream; no target makes it batch."""
        request = ask(prompt_tokens, tpot_s, name)
        key = (name, 1, m.Leg.AGGREGATED)
        batch = tpot_s is None
        booking = Booking(request, Phase.PENDING, prompt_tokens, 0, 0, 0.0, batch=batch)
        self.account.book(key, booking)
        if first_s is not None:
            self.account.first_token(key, first_s)

    def prefill(self, tokens: int) -> str:
        return self.guards.why_prefill_breaks(self.account, tokens, 0.0, tokens, NOW_S)

    def decode(self, request: m.GenerateRequest, *, floor_s: float | None = None) -> str:
        """Ask for an interactive request, or (with `floor_s`) for a batch one."""
        batch = floor_s is not None
        own_s = request.slo.tpot_s or math.inf if floor_s is None else floor_s
        return self.guards.why_decode_breaks(
            self.account, request, batch=batch, floor_s=own_s, now_s=NOW_S
        )


def ask(prompt_tokens: int, tpot_s: float | None = None, name: str = "new") -> m.GenerateRequest:
    return m.GenerateRequest(name, "m", prompt_tokens, slo=m.Slo(tpot_s=tpot_s))


# --- G2a: streams that run ------------------------------------------------------------------------


def test_a_running_stream_spends_its_slack_and_no_more() -> None:
    # 20 tokens to go, due at 1.0 + 20 * 0.05. A prompt of 900 stalls it 0.9 s over ten steps, each
    # of which gives it a token; the ten others take 0.1 s.
    bench = Bench()
    bench.book("s", 50, 0.05, first_s=1.0)
    assert bench.prefill(899) == ""
    assert bench.prefill(901) == STREAM


def test_all_unanswered_prefill_counts_not_the_newcomer_alone() -> None:
    bench = Bench()
    bench.book("s", 50, 0.05, first_s=1.0)
    bench.book("b", 500, None)
    assert bench.prefill(399) == ""
    assert bench.prefill(401) == STREAM


def test_the_tightest_of_several_streams_decides() -> None:
    bench = Bench()
    bench.book("loose", 50, 0.5, first_s=1.0)
    bench.book("tight", 50, 0.03, first_s=1.0)  # due at 1.6
    bench.book("loose2", 50, 0.5, first_s=1.0)
    assert bench.prefill(450) == ""  # 0.45 + 15 * 0.01
    assert bench.prefill(470) == STREAM  # 0.47 + 15 * 0.01


def test_a_stream_that_is_lost_does_not_close_its_worker() -> None:
    bench = Bench()
    bench.book("lost", 50, 0.05, first_s=0.0)  # due at 1.0, and 0.2 s of steps to go at 1.0
    assert bench.prefill(5000) == ""


def test_batch_streams_are_not_protected() -> None:
    bench = Bench()
    bench.book("b", 50, None, first_s=1.0)
    assert bench.prefill(50_000) == ""


def test_slack_grows_back_as_tokens_come_in_time() -> None:
    bench = Bench()
    bench.book("s", 50, 0.05, first_s=0.5)  # due at 1.5: at 1.0 s it has 0.5 s left for 20 tokens
    assert bench.prefill(450) == STREAM
    bench.account.progress(("s", 1, m.Leg.AGGREGATED), 16, 1.0)  # 5 tokens left
    assert bench.prefill(450) == ""


# --- G2b: prompts that wait -----------------------------------------------------------------------


def test_a_waiting_prompt_is_protected_from_what_comes_after_it() -> None:
    # Once it has its first token, 20 more must come within 20 * 0.05 s.
    bench = Bench()
    bench.book("j", 100, 0.05)
    assert bench.prefill(899) == ""
    assert bench.prefill(901) == WAITING


def test_everything_dispatched_after_it_counts_and_nothing_before() -> None:
    bench = Bench()
    bench.book("before", 3000, None)
    bench.book("j", 100, 0.05)
    bench.book("after", 400, None)
    assert bench.prefill(499) == ""
    assert bench.prefill(501) == WAITING


def test_a_waiting_batch_prompt_is_not_protected() -> None:
    bench = Bench()
    bench.book("b", 100, None)
    assert bench.prefill(50_000) == ""


# --- G3: the rate ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own_s,other_s,why",
    [(0.0150, 0.5, OWN), (0.0155, 0.5, ""), (0.5, 0.0150, SLOW), (0.5, 0.0155, "")],
)
def test_a_step_keeps_every_target_with_a_tenth_to_spare(
    own_s: float, other_s: float, why: str
) -> None:
    bench = Bench(SLOWING)
    bench.book("s", 50, other_s, first_s=1.0)
    bench.book("b", 50, None, first_s=1.0)
    bench.book("j", 50, 0.5)
    # three soon, and the newcomer: 1.1 * (10 + 4) ms = 15.4 ms
    assert bench.decode(ask(50, own_s)) == why


@pytest.mark.parametrize("floor_s,why", [(0.0225, OWN), (0.0235, "")])
def test_batch_keeps_the_floor_for_interactive_requests_to_come(floor_s: float, why: str) -> None:
    bench = Bench(SLOWING)
    for number in range(10):
        bench.book(f"b{number}", 50, None, first_s=1.0)
    assert bench.decode(ask(50), floor_s=floor_s) == why  # 1.1 * (10 + 11) ms = 23.1 ms


@pytest.mark.parametrize("streams,why", [(3, ""), (5, OWN)])
def test_a_worker_too_slow_for_the_floor_still_takes_a_little_batch(streams: int, why: str) -> None:
    # Alone a step takes 11 ms, so 16.5 ms stand in for a floor that it can never keep.
    bench = Bench(SLOWING)
    for number in range(streams):
        bench.book(f"b{number}", 50, None, first_s=1.0)
    assert bench.decode(ask(50), floor_s=0.001) == why  # 15.4 ms and 17.6 ms


def test_a_target_no_step_can_keep_closes_nothing() -> None:
    bench = Bench(SLOWING)
    bench.book("absurd", 50, 0.012, first_s=1.0)  # 1.1 * 11 ms even alone
    assert bench.decode(ask(50, 0.5)) == ""


def test_what_was_booked_a_moment_ago_counts() -> None:
    bench = Bench(SLOWING)
    assert bench.decode(ask(50, 0.5)) == ""
    bench.book("tight", 50, 0.0122)
    assert bench.decode(ask(50, 0.5)) == SLOW


def test_a_request_without_a_target_is_held_to_those_of_others() -> None:
    bench = Bench(SLOWING)
    assert bench.decode(ask(50)) == ""
    bench.book("s", 50, 0.0130, first_s=1.0)
    assert bench.decode(ask(50)) == SLOW


# --- G4: memory -----------------------------------------------------------------------------------


@pytest.mark.parametrize("output_tokens,why", [(1200, ""), (1201, "no KV room")])
def test_prompt_and_mean_output_fit_with_a_reserve(output_tokens: int, why: str) -> None:
    bench = Bench(kv_tokens=10_000, output_tokens=output_tokens)
    bench.book("s", 3999, 0.05, first_s=1.0)  # holds 4,000
    bench.book("j", 1000, 0.05)
    assert bench.decode(ask(3000, 0.05)) == why


def test_an_idle_worker_takes_any_prompt() -> None:
    assert Bench(kv_tokens=1000).decode(ask(50_000, 0.05)) == ""


@pytest.mark.parametrize("output_tokens,why", [(500, ""), (501, "batch has its share of KV")])
def test_batch_has_half_of_the_memory(output_tokens: int, why: str) -> None:
    bench = Bench(kv_tokens=10_000, output_tokens=output_tokens)
    bench.book("b", 2499, None, first_s=1.0)
    assert bench.decode(ask(2000), floor_s=1.0) == why


def test_a_worker_that_does_not_tell_its_memory_is_not_guarded() -> None:
    bench = Bench(kv_tokens=0)
    bench.book("s", 90_000, 0.05, first_s=1.0)
    assert bench.decode(ask(90_000, 0.05)) == ""


# --- switches -------------------------------------------------------------------------------------


def test_each_guard_can_be_switched_off() -> None:
    off = GuardSettings(running=False, pending=False, rate=False, memory=False)
    bench = Bench(SLOWING, kv_tokens=1000, settings=off)
    bench.book("s", 500, 0.011, first_s=1.0)
    bench.book("j", 500, 0.011)
    assert bench.prefill(5000) == ""
    assert bench.decode(ask(5000, 0.001)) == ""
    for only, why in (("running", STREAM), ("pending", WAITING)):
        bench.guards.settings = GuardSettings(
            **{name: name == only for name in ("running", "pending", "rate", "memory")}
        )
        assert bench.prefill(5000) == why


# --- G1: its own deadline -------------------------------------------------------------------------


def slack_worker() -> Scheduler:
    """Return a scheduler whose one worker has a second of prefill before it."""
    scheduler = Scheduler(Slack())
    snapshot = m.WorkerSnapshot("w", m.Role.AUTO, "x", ("m",), coefficients=SPEED, exact=True)
    scheduler.step(m.WorkerReported(snapshot), 0.0)
    first = m.GenerateRequest("first", "m", 1000, slo=m.Slo(ttft_s=5.0))
    assert any(isinstance(c, m.StartAggregated) for c in arrive(scheduler, first))
    return scheduler


def arrive(scheduler: Scheduler, request: m.GenerateRequest) -> list[m.Command]:
    return scheduler.step(m.RequestArrived(request), 0.0)


@pytest.mark.parametrize("ttft_s,starts", [(1.19, False), (1.21, True)])
def test_a_request_is_released_when_its_first_token_can_be_in_time(
    ttft_s: float, starts: bool
) -> None:
    request = m.GenerateRequest("new", "m", 200, slo=m.Slo(ttft_s=ttft_s))
    commands = arrive(slack_worker(), request)
    assert any(isinstance(c, m.StartAggregated) for c in commands) == starts


@pytest.mark.parametrize("ttft_s,refused", [(0.19, True), (0.21, False)])
def test_a_hopeless_request_is_refused_when_it_asked_for_that(ttft_s: float, refused: bool) -> None:
    """Hopeless: 200 tokens take 0.2 s even on an idle worker."""
    request = m.GenerateRequest("new", "m", 200, slo=m.Slo(ttft_s=ttft_s), fail_fast=True)
    rejects = [c for c in arrive(slack_worker(), request) if isinstance(c, m.Reject)]
    assert [r.refusal for r in rejects] == [m.Refusal.HOPELESS] * refused
    for reject in rejects:
        assert reject.retry_after_s is not None
        assert 1.0 <= reject.retry_after_s <= 2.0  # 1.2 s of work, spread by up to a quarter
        assert "about 1.2 s" in reject.detail
