"""Real vLLM, unmodified: prefilled on one server and decoded on another, through the router.

Neither server caches prefixes, so a prompt's tokens are computed or come from the other one, and
nothing else can explain what the counters say.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.engines.vllm_cpu import VllmServer, VllmSpec, example, nixl, running
from router.backends.prometheus_text import Series, read_series
from router.backends.vllm_facts import BY_SOURCE, EXPIRED, READ_TOO_LATE
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawClient
from splitserve.messages import WorkerReported

MODEL = "smollm2-135m"
BLOCK_TOKENS = 32
LEASE_S = 15
OUTPUT_TOKENS = 6
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WHOLE = {"x-splitserve-plan": "aggregated"}
TEXT = (
    "The lighthouse stood at the end of a long stone pier, and every evening an old keeper climbed "
    "its two hundred steps with a can of oil. He counted ships, wrote down the wind, and told "
    "nobody what he saw when the fog came in. One winter a boat without lamps drifted past, and in "
    "it sat a woman who read a book as if she were at home by the fire. He called to her; she "
    "turned a page. In the morning the sea was flat as a table, and on the lowest step lay a dry "
    "and open book, written in a hand that he knew to be his own. "
)
# Around the ends of blocks, but for one more than whole blocks, of which files are not found.
LENGTHS = (
    *(40, 62, 63, 64, 66, 67, 95, 96, 98, 110, 127, 128, 130, 131, 150, 159, 160, 162, 177, 192),
    *(200, 224, 256, 350),
)
NOT_FOUND = (65, 97, 129)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers, and what the router is told of how they move KV."""

    p: VllmServer
    d: VllmServer
    kv: dict[str, object]

    @contextlib.asynccontextmanager
    async def routed(self) -> AsyncIterator[Routed]:
        """A router in front of the two."""
        entries = [
            {"url": server.url, "name": server.spec.name, "role": role, "kv": self.kv}
            for server, role in ((self.p, "prefill"), (self.d, "decode"))
        ]
        patience: dict[str, Any] = {"limits": {"max_wait_s": 300.0}, "report_interval_s": 1.0}
        async with LoopbackRouter(*entries, wait=False, **patience) as router:
            members = router.app.registry.members.values()
            await router.until(lambda: all(member.alive for member in members), 60.0)
            async with httpx.AsyncClient(base_url=router.url, timeout=120.0) as client:
                yield Routed(self, router, client)
                await router.idle()


@dataclass(frozen=True, slots=True)
class Routed:
    """A router in front of a pair, and a patient client of it."""

    pair: Pair
    router: LoopbackRouter
    client: httpx.AsyncClient

    async def ask(self, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        """An answer that must be one."""
        path = CHAT if "messages" in body else COMPLETIONS
        answer = await self.client.post(path, json=body, headers=headers or {})
        assert answer.status_code == 200, answer.text
        return answer

    async def meet(self) -> None:
        """Let the two servers meet, which may take longer than a lease: then it is tried again."""
        for _ in range(5):
            answer = await self.ask(request("Good evening. " * 20))
            if answer.headers["x-splitserve-plan"] == "disaggregated":
                return
        pytest.fail(f"the two never met: {self.router.latest()['failures']}")

    async def poll(self) -> None:
        """Let the router look at the decode worker's counters twice more."""
        wanted = self._polls() + 3  # one of them may be under way
        await self.router.until(lambda: self._polls() >= wanted, 60.0)

    def _polls(self) -> int:
        reports = (e for e, _ in self.router.steps if isinstance(e, WorkerReported))
        return sum(report.snapshot.worker_id == "d" for report in reports)


def request(prompt: object, **more: object) -> dict[str, Any]:
    known = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    return {**known, "prompt": prompt, "return_token_ids": True, **more}


def output(answer: httpx.Response) -> tuple[list[int], str]:
    """Which tokens came, and as what text."""
    choice = answer.json()["choices"][0]
    return choice["token_ids"], choice.get("text") or choice["message"]["content"]


async def counters(server: VllmServer) -> Series:
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
        text = (await client.get("/metrics")).content
    return read_series(text, (BY_SOURCE, EXPIRED, READ_TOO_LATE))


def moved(before: Series, after: Series, source: str) -> int:
    return int(after.total(BY_SOURCE, source=source) - before.total(BY_SOURCE, source=source))


async def token_ids(server: VllmServer) -> list[int]:
    async with httpx.AsyncClient(base_url=server.url, timeout=60.0) as client:
        answer = await client.post("/tokenize", json={"model": MODEL, "prompt": TEXT * 6})
    ids: list[int] = answer.json()["tokens"]
    return ids


async def thirty_requests(server: VllmServer) -> list[dict[str, Any]]:
    """Ids of chosen lengths, texts and chats, all of them different from their first block on."""
    ids = await token_ids(server)
    requests = [request(ids[number : number + length]) for number, length in enumerate(LENGTHS)]
    for number in range(3):
        requests.append(request(f"Here begins part {number}. {TEXT * (1 + number % 2)}"))
        message = {"role": "user", "content": f"Question {number}: {TEXT} What did he read?"}
        chat = request(None, messages=[message])
        del chat["prompt"]
        requests.append(chat)
    assert len(requests) == 30
    return requests


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[list[int], str]]:
    """Answers of whole runs by request; each is made by the first pair that is asked for it.

    That is the files' one, which has no threads of NIXL's to share its cores with.
    """
    return {}


async def whole(
    routed: Routed, body: dict[str, Any], known: dict[str, tuple[list[int], str]]
) -> tuple[list[int], str]:
    key = repr(sorted(body.items()))
    if key not in known:
        answer = await routed.ask(body, WHOLE)
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        known[key] = output(answer)
    return known[key]


async def check_nixl(pair: Pair, expected: dict[str, tuple[list[int], str]]) -> None:
    """Thirty splits: the tokens of whole runs, and none of their prompts computed on D."""
    async with pair.routed() as routed:
        await routed.meet()
        requests = await thirty_requests(pair.d)
        wanted = [await whole(routed, body, expected) for body in requests]
        await routed.poll()
        before, sent = await counters(pair.d), 0
        p_before = await counters(pair.p)  # the first meeting may have read too late
        for body, want in zip(requests, wanted, strict=True):
            answer = await routed.ask(body)
            assert answer.headers["x-splitserve-plan"] == "disaggregated", routed.router.latest()
            assert output(answer) == want
            sent += answer.json()["usage"]["prompt_tokens"]
        await routed.router.idle()
        after = await counters(pair.d)
        assert moved(before, after, "external_kv_transfer") == sent
        assert moved(before, after, "local_compute") == 0
        await routed.poll()
        text = (await routed.client.get("/metrics")).text
        assert "\nsplitserve_handoff_recomputes_total 0.0\n" in text
        p_after = await counters(pair.p)
        assert p_after.total(READ_TOO_LATE) == p_before.total(READ_TOO_LATE)


def empty(folder: Path) -> None:
    for made in folder.iterdir():
        shutil.rmtree(made)


class TestFiles:
    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        folder = tmp_path_factory.mktemp("kv")
        specs = [
            VllmSpec("p", example("kv_producer", folder)),
            VllmSpec("d", example("kv_consumer", folder)),
        ]
        with running(specs, model_folder, MODEL) as (p, d):
            yield Pair(p, d, {"connector": "example", "folder": str(folder)})

    async def test_thirty_splits(
        self, pair: Pair, expected: dict[str, tuple[list[int], str]]
    ) -> None:
        async with pair.routed() as routed:
            requests = await thirty_requests(pair.d)
            wanted = [await whole(routed, body, expected) for body in requests]
            empty(Path(str(pair.kv["folder"])))  # whole runs write there too
            await routed.poll()
            before, sent, found = await counters(pair.d), 0, 0
            for body, want in zip(requests, wanted, strict=True):
                answer = await routed.ask(body)
                assert answer.headers["x-splitserve-plan"] == "disaggregated", (
                    routed.router.latest()
                )
                assert output(answer) == want
                tokens = answer.json()["usage"]["prompt_tokens"]
                sent += tokens
                found += (tokens - 2) // BLOCK_TOKENS * BLOCK_TOKENS
            after = await counters(pair.d)
            assert moved(before, after, "external_kv_transfer") == found
            assert moved(before, after, "local_compute") == sent - found
            assert found > sent / 2
            await routed.poll()
            text = (await routed.client.get("/metrics")).text
            assert "\nsplitserve_handoff_recomputes_total 0.0\n" in text

    async def test_a_prompt_of_which_nothing_would_be_found_is_answered_whole(
        self, pair: Pair
    ) -> None:
        async with pair.routed() as routed:
            ids = await token_ids(pair.d)
            for number, length in enumerate(NOT_FOUND):
                body = request(ids[50 + number : 50 + number + length])
                answer = await routed.ask(body)
                assert answer.headers["x-splitserve-plan"] == "aggregated"
                record = await routed.router.record(answer)
                assert f"prompt of {length} tokens" in record["failures"][0]


class TestNixlPull:
    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, model_folder: Path) -> Iterator[Pair]:
        specs = [
            VllmSpec("p", nixl("kv_producer", lease_s=LEASE_S), kv_bytes=48 << 20),
            VllmSpec("d", nixl("kv_consumer", lease_s=LEASE_S)),
        ]
        with running(specs, model_folder, MODEL) as (p, d):
            yield Pair(p, d, {"connector": "nixl-pull", "lease_s": float(LEASE_S)})

    async def test_thirty_splits(
        self, pair: Pair, expected: dict[str, tuple[list[int], str]]
    ) -> None:
        await check_nixl(pair, expected)

    async def test_a_sampled_stream_is_that_of_a_whole_run(self, pair: Pair) -> None:
        more = {"temperature": 0.9, "seed": 7, "stream": True}
        body = request(TEXT, stream_options={"include_usage": True}, **more)
        async with pair.routed() as routed:
            await routed.meet()
            answers = [await routed.ask(body, headers) for headers in (WHOLE, None)]
            plans = [answer.headers["x-splitserve-plan"] for answer in answers]
            assert plans == ["aggregated", "disaggregated"]
            ran_whole, split = ([_anonymous(e) for e in a.text.split("\n\n")] for a in answers)
            assert split == ran_whole
            assert len(split) > OUTPUT_TOKENS

    async def test_a_decode_leg_after_the_lease_is_prefilled_again(self, pair: Pair) -> None:
        body = request(f"The tide went out. {TEXT}")
        async with pair.routed() as routed:
            await routed.meet()
            want = output(await routed.ask(body, WHOLE))
            before = await counters(pair.p)
            backend = routed.router.app.dispatcher.backends["d"]
            send, late = backend.decode, asyncio.Event()

            async def delayed(*args: Any) -> Any:
                if not late.is_set():
                    late.set()
                    await _spoil_old_blocks(pair.p)
                return await send(*args)

            backend.decode = delayed  # type: ignore[method-assign,assignment]
            answer = await routed.ask(body)
            assert output(answer) == want
            record = await routed.router.record(answer)
            assert record["attempts"] == 2
            assert f"its lease is {LEASE_S} s" in record["failures"][0]
            after = await counters(pair.p)
            assert after.total(EXPIRED) == before.total(EXPIRED) + 1
            assert after.total(READ_TOO_LATE) == before.total(READ_TOO_LATE)


def _anonymous(event: str) -> str:
    """An event without what names the one answer it is of."""
    for name in ("id", "created"):
        event = re.sub(rf'"{name}":("[^"]*"|\d+),', "", event)
    return event


async def _spoil_old_blocks(server: VllmServer) -> None:
    """Wait until the lease is over, then put other prompts into every block there is."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), LEASE_S + 2)
    async with httpx.AsyncClient(base_url=server.url, timeout=120.0) as client:
        for number in range(3):
            body = request([100 + number] * 900, max_tokens=1)
            assert (await client.post(COMPLETIONS, json=body)).status_code == 200


class TestNixlPush:
    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, model_folder: Path) -> Iterator[Pair]:
        specs = [
            VllmSpec("p", nixl("kv_producer", push=True, engine_id="prefill-engine")),
            VllmSpec("d", nixl("kv_consumer", push=True)),
        ]
        with running(specs, model_folder, MODEL) as (p, d):
            where = {"engine_id": "prefill-engine", "side_channel": p.side_channel}
            yield Pair(p, d, {"connector": "nixl-push", **where})

    async def test_thirty_splits(
        self, pair: Pair, expected: dict[str, tuple[list[int], str]]
    ) -> None:
        await check_nixl(pair, expected)

    async def test_a_client_that_leaves_leaves_nothing_running(self, pair: Pair) -> None:
        body = request(f"Nobody waits for this. {TEXT}", max_tokens=500)
        async with pair.routed() as routed:
            await routed.meet()
            async with RawClient(routed.router.url) as client:
                client.post(COMPLETIONS, json.dumps(body).encode())
                in_use = routed.router.in_use
                await routed.router.until(lambda: in_use(pair.d.url) == in_use(pair.p.url) == 1)
            await routed.router.idle()
            for server in (pair.p, pair.d):
                await until_idle(server)
            want = output(await routed.ask(request(TEXT), WHOLE))
            assert output(await routed.ask(request(TEXT))) == want


async def until_idle(server: VllmServer) -> None:
    """Wait until nothing runs or waits there."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    async with asyncio.timeout(30.0), httpx.AsyncClient(base_url=server.url) as client:
        while True:
            series = read_series((await client.get("/metrics")).content, names)
            if sum(series.total(name) for name in names) == 0:
                return
