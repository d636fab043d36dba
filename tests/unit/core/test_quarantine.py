"""A pair that was judged: no hand-offs until its time is over, and why, wherever one looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from splitserve import eventlog
from splitserve import messages as m
from splitserve.pairing import Pairs
from splitserve.scheduling import Scheduler
from splitserve.scheduling.policies import Policy
from splitserve.scheduling.policies.least_work import LeastWork
from splitserve.scheduling.policies.slack import Slack

REASON = "its greedy answer was not what d says alone"


def worker(worker_id: str, role: m.Role) -> m.WorkerSnapshot:
    return m.WorkerSnapshot(
        worker_id, role, "fake", ("m",), "native", "weights=1", prefill_tok_s=1e4, decode_tok_s=100
    )


PREFILL, DECODE = worker("p", m.Role.PREFILL), worker("d", m.Role.DECODE)


class Story:
    """A scheduler whose events are logged, one request after another."""

    def __init__(self, policy: Callable[[], Policy], *workers: m.WorkerSnapshot) -> None:
        self.policy = policy
        self.scheduler = Scheduler(policy())
        self.log: list[str] = []
        self.said: list[list[m.Command]] = []
        for each in workers or (PREFILL, DECODE):
            self.tell(m.WorkerReported(each), 0.0)

    def tell(self, event: m.Event, now_s: float) -> list[m.Command]:
        self.log.append(eventlog.encode(now_s, event))
        self.said.append(self.scheduler.step(event, now_s))
        return self.said[-1]

    def ask(self, name: str, now_s: float) -> m.StartAggregated | m.StartPrefill:
        [start] = self.tell(m.RequestArrived(m.GenerateRequest(name, "m", 4000)), now_s)
        assert isinstance(start, m.StartAggregated | m.StartPrefill)
        self.tell(m.RequestCancelled(name), now_s)
        return start


@pytest.fixture(params=[LeastWork, Slack], ids=["least-work", "slack"])
def story(request: pytest.FixtureRequest) -> Story:
    return Story(request.param)


def test_a_judged_pair_is_not_used_and_the_reason_is_among_the_candidates(story: Story) -> None:
    assert isinstance(story.ask("before", 1.0), m.StartPrefill)
    assert story.tell(m.PairJudged("p", "d", REASON, 60.0), 2.0) == []
    start = story.ask("meanwhile", 3.0)
    assert isinstance(start, m.StartAggregated)
    assert start.worker_id == "d"
    why = {(c.prefill_worker, c.decode_worker): c.why_not for c in start.choice.candidates}
    assert why["p", "d"] == f"quarantined: {REASON}"
    assert isinstance(story.ask("still", 59.9), m.StartAggregated)
    assert isinstance(story.ask("after", 60.0), m.StartPrefill)
    assert story.scheduler.ledger.pairs.quarantined == {}


def test_an_empty_reason_lifts_it(story: Story) -> None:
    story.tell(m.PairJudged("p", "d", REASON, 60.0), 2.0)
    story.tell(m.PairJudged("p", "d", ""), 3.0)
    assert isinstance(story.ask("r", 4.0), m.StartPrefill)


def test_only_that_pair_is_meant(story: Story) -> None:
    story.tell(m.WorkerReported(worker("e", m.Role.DECODE)), 1.0)
    story.tell(m.PairJudged("p", "d", REASON, 60.0), 2.0)
    start = story.ask("r", 3.0)
    assert isinstance(start, m.StartPrefill)
    assert start.decode_worker_id == "e"


def test_a_worker_that_comes_back_is_another(story: Story) -> None:
    story.tell(m.PairJudged("p", "d", REASON, 60.0), 2.0)
    story.tell(m.WorkerLost("d", "restarted"), 3.0)
    story.tell(m.WorkerReported(DECODE), 4.0)
    assert isinstance(story.ask("r", 5.0), m.StartPrefill)


def test_a_judgement_of_a_worker_that_has_left_is_nothing(story: Story) -> None:
    story.tell(m.WorkerLost("d", "killed"), 1.0)
    story.tell(m.PairJudged("p", "d", REASON, 60.0), 2.0)
    assert story.scheduler.ledger.pairs.quarantined == {}


def test_a_request_that_waits_is_tried_again_when_the_judgement_opens_a_way(story: Story) -> None:
    """While the pair may split, its declared decode worker runs nothing whole."""
    full = m.WorkerSnapshot(
        "p", m.Role.PREFILL, "fake", ("m",), "native", "weights=1", max_running=1
    )
    story.tell(m.WorkerReported(full), 0.5)
    story.tell(m.RequestArrived(m.GenerateRequest("first", "m", 4000)), 1.0)
    commands = story.tell(m.RequestArrived(m.GenerateRequest("second", "m", 4000)), 1.1)
    assert not any(isinstance(c, m.StartAggregated | m.StartPrefill) for c in commands)
    [start] = story.tell(m.PairJudged("p", "d", REASON, 60.0), 1.2)
    assert isinstance(start, m.StartAggregated)
    assert (start.request_id, start.worker_id) == ("second", "d")


def test_replay_says_the_same(story: Story) -> None:
    story.ask("r1", 1.0)
    story.tell(m.PairJudged("p", "d", REASON, 2.0 + 0.1 + 0.2), 2.0)
    for number in range(6):
        story.ask(f"s{number}", 2.0 + 0.1 * number)
    assert {type(c) for said in story.said for c in said} >= {m.StartPrefill, m.StartAggregated}
    again = list(eventlog.replay(story.log, Scheduler(story.policy())))
    assert again == story.said


def test_a_judgement_survives_the_log() -> None:
    for event in (m.PairJudged("p", "d", REASON, 0.1 + 0.2), m.PairJudged("p", "d", "")):
        assert eventlog.decode(eventlog.encode(1.0, event)) == (1.0, event)


def test_a_shorter_judgement_does_not_shorten_one_that_stands() -> None:
    pairs = Pairs()
    assert pairs.judge(m.PairJudged("p", "d", "wrong text", 600.0))
    assert not pairs.judge(m.PairJudged("p", "d", "computed again", 300.0))
    assert pairs.quarantined["p", "d"].reason == "wrong text"
    pairs.judge(m.PairJudged("p", "d", "computed again", 900.0))
    assert pairs.quarantined["p", "d"].until_s == 900.0
    assert not pairs.lift(899.0)
    assert pairs.lift(900.0)
    assert not pairs.judge(m.PairJudged("p", "d", ""))


def test_keys_that_differ_are_named_before_any_judgement() -> None:
    pairs = Pairs()
    pairs.judge(m.PairJudged("p", "d", REASON, 60.0))
    odd = m.WorkerSnapshot("d", m.Role.DECODE, "fake", ("m",), "native", "weights=2")
    assert pairs.why_not(PREFILL, odd) == "KV differs in weights (1 / 2)"
    assert not pairs.any([PREFILL, DECODE])
    assert pairs.any([PREFILL, DECODE, worker("e", m.Role.DECODE)])
