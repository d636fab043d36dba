"""Many requests at once, with clients that leave and workers that fail: no leak, and a true log."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from router.testing.fake_native import FakeNative, PrefillScript
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import eventlog
from splitserve import messages as m
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies.slack import Slack

CHAT = "/v1/chat/completions"
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 12}
STREAM = {**PLAIN, "stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True, slots=True)
class Fleet:
    """Two prefill workers, two decode workers and one that does both, all small."""

    prefills: list[FakeNative]
    decodes: list[FakeNative]
    whole: FakeNative

    @property
    def all(self) -> list[FakeNative]:
        return [*self.prefills, *self.decodes, self.whole]

    @property
    def specs(self) -> list[dict[str, str]]:
        return [{"url": fake.url, "name": f"w{i}"} for i, fake in enumerate(self.all)]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    async with (
        FakeNative(role="prefill") as a,
        FakeNative(role="prefill") as b,
        FakeNative(role="decode") as c,
        FakeNative(role="decode") as d,
        FakeNative(role="aggregated") as e,
    ):
        for fake in (a, b, c, d, e):
            fake.profile.max_running = 8
        yield Fleet([a, b], [c, d], e)


def misbehave(fleet: Fleet, rng: random.Random, count: int) -> None:
    """Queue faults of every kind among good answers."""
    prefill_faults = [
        PrefillScript(status=500),
        PrefillScript(status=400),
        PrefillScript(stop_at="before_offer"),
        PrefillScript(stop_at="after_offer"),
        PrefillScript(second_line_error=True),
        PrefillScript(raw_line="no json"),
    ]
    faults = [
        Script(status=503),
        Script(status=429),
        Script(status=400),
        Script(cut_before_headers=True),
        Script(cut="rst", cut_after_chunks=3),
        Script(split_bytes=50, cut="fin", cut_after_chunks=20),
        Script(raw="HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"),
    ]
    for _ in range(count):
        for fake in fleet.prefills:
            good = rng.random() < 0.6
            fake.enqueue_prefill(PrefillScript() if good else rng.choice(prefill_faults))
        for fake in (*fleet.decodes, fleet.whole):
            good = rng.random() < 0.6
            fake.enqueue(Script() if good else rng.choice(faults))


async def ask(router: LoopbackRouter, leave_after: int | None, body: dict[str, object]) -> str:
    """Send one request; leave after so many bytes of an answer, None: read it to its end."""
    async with RawClient(router.url) as client:
        client.post(CHAT, json.dumps(body).encode(), ("connection: close",))
        if leave_after is None:
            answer = await client.answer()
            return "whole" if answer.complete else "cut"
        if leave_after > 0:
            await client.some(leave_after)
        else:
            await asyncio.sleep(0)
    return "left"


async def mixed_load(router: LoopbackRouter, fleet: Fleet, seed: int, rounds: int) -> list[str]:
    rng = random.Random(seed)
    ends: list[str] = []
    for number in range(rounds):
        misbehave(fleet, rng, 4)
        jobs = []
        for _ in range(16):
            leave = rng.choice([None, None, 0, 1, 400, 900])
            jobs.append(ask(router, leave, rng.choice([PLAIN, STREAM])))
        if number % 3 == 1:  # a worker is restarted in the middle
            fake = rng.choice(fleet.all)
            fake.profile.instance = f"instance-{number}"
            router.app.registry.poke(f"w{fleet.all.index(fake)}")
        ends += await asyncio.gather(*jobs)
    return ends


@pytest.fixture
def tolerated() -> list[str]:
    return ["ASGI callable returned without completing response."]


@pytest.mark.parametrize("seed", [1, 2])
async def test_replay_gives_the_same_commands(fleet: Fleet, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "events.jsonl"
    limits = {"attempts": 3, "queue": 40, "max_wait_s": 2.0}
    router = LoopbackRouter(*fleet.specs, event_log=str(path), limits=limits)
    async with router:
        ends = await mixed_load(router, fleet, seed, rounds=8)
        await router.idle()
    assert {"whole", "left"} <= set(ends)
    seen = {type(event).__name__ for event, _ in router.steps}
    assert seen >= {
        "RequestArrived", "HandoffReady", "PrefillFinished", "FirstToken", "DecodeFinished",
        "LegFailed", "RequestCancelled", "WorkerReported", "WorkerLost",
    }  # fmt: skip
    lines = path.read_text().splitlines()
    assert len(lines) == len(router.steps)
    fresh = Scheduler(Slack(), SchedulerLimits(queue=40, attempts=3, max_wait_s=2.0))
    for (event, live), replayed in zip(router.steps, eventlog.replay(lines, fresh), strict=True):
        assert replayed == live, event
        assert list(map(eventlog.encode_command, replayed)) == list(
            map(eventlog.encode_command, live)
        )
    assert fresh.live == 0


async def test_every_request_ends_once_and_every_handoff_too(fleet: Fleet) -> None:
    async with LoopbackRouter(*fleet.specs) as router:
        await mixed_load(router, fleet, seed=3, rounds=8)
        await router.idle()
        events = [event for event, _ in router.steps]
        commands = [command for _, commands in router.steps for command in commands]
        arrived = [e.request.request_id for e in events if isinstance(e, m.RequestArrived)]
        assert len(arrived) == len(set(arrived)) == 128
        offered = [e.handoff for e in events if isinstance(e, m.HandoffReady)]
        released = [c.handoff for c in commands if isinstance(c, m.ReleaseKV)]
        assert sorted(offered, key=repr) == sorted(released, key=repr)
        for fake in fleet.prefills:
            for call in fake.calls("/splitserve/prefill"):
                assert call.outcome != "open"


async def test_64_streams_half_of_which_are_left(fleet: Fleet) -> None:
    rng = random.Random(4)
    tasks_before = len(asyncio.all_tasks())
    async with LoopbackRouter(*fleet.specs) as router:
        leave = [None] * 32 + [rng.choice([0, 1, 300, 700]) for _ in range(32)]
        rng.shuffle(leave)
        ends = await asyncio.gather(*[ask(router, after, STREAM) for after in leave])
        await router.idle()
        assert sorted(ends) == ["left"] * 32 + ["whole"] * 32
        assert router.app.dispatcher.live == 0
        for fake in fleet.all:
            await fake.until(lambda f: f.open_streams == 0)
            assert router.in_use(fake.url) == 0
        records = router.app.dispatcher.records.latest(100)
        assert len(records) <= 64
        assert {r.finish for r in records} <= {"done", "cancelled"}
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) <= tasks_before + 1  # pytest's own may come


async def test_queue_is_bounded_and_says_when_to_come_back() -> None:
    async with FakeNative(role="aggregated") as fake:
        fake.profile.max_running = 1
        fake.enqueue(Script(silent=True))
        limits = {"queue": 2}
        async with LoopbackRouter({"url": fake.url}, limits=limits) as router:
            waiting = [asyncio.ensure_future(ask(router, None, PLAIN)) for _ in range(3)]
            await router.until(lambda: router.app.scheduler.queued == 2)
            answer = await router.client.post(CHAT, json=PLAIN)
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "queue_full"
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert int(answer.headers["retry-after"]) >= 1
            waiting[0].cancel()
            ends = await asyncio.gather(*waiting, return_exceptions=True)
            assert ends[1:] == ["whole", "whole"]
            await router.idle()


async def test_request_that_waits_too_long_is_told_why() -> None:
    async with FakeNative(role="aggregated") as fake:
        fake.profile.max_running = 1
        fake.enqueue(Script(silent=True))
        limits = {"max_wait_s": 0.1}
        async with LoopbackRouter({"url": fake.url}, limits=limits) as router:
            first = asyncio.ensure_future(ask(router, None, PLAIN))
            await fake.until(lambda f: f.requests[-1].method == "POST")
            answer = await router.client.post(CHAT, json=PLAIN)
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert "waited 0.1 s for a worker; full: 1 of 1 running" in message
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await router.idle()


async def test_records_are_bounded(router_of_one: LoopbackRouter) -> None:
    router = router_of_one
    router.app.dispatcher.records._limit = 5
    for number in range(12):
        await router.client.post(CHAT, json=PLAIN, headers={"x-request-id": f"c{number % 7}"})
    records = router.app.dispatcher.records
    assert len(records) == 5
    assert len(records._aliases) <= 7
    found = (await router.client.get("/admin/requests/c4")).json()
    assert found["client_request_id"] == "c4"


@pytest.fixture
async def router_of_one() -> AsyncIterator[LoopbackRouter]:
    async with FakeOpenAI() as fake, LoopbackRouter({"url": fake.url}) as router:
        yield router
