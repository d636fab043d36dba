"""Two real llama-servers and two couriers behind the real router: split answers equal whole ones.

Whatever happens to a slot file on its way, no server crashes and no answer is wrong, and
afterwards every slot is free and no file is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.process_tree import free_port
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawClient
from splitserve.messages import Handoff
from tests.engines.conftest import MODEL, program, running
from workers.courier.testing.served_courier import ServedCourier

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPLIT = {"x-splitserve-plan": "disaggregated"}
WHOLE = {"x-splitserve-plan": "aggregated", "x-splitserve-worker": "d"}
SAFE = ("--kv-unified", "--no-cache-idle-slots", "--flash-attn", "on", "--metrics", "--slots")
OUTPUT_TOKENS = 12
WAIT_S = 60.0
STORY = (
    "The ferry left the harbour at six, and the old woman at the rail counted the gulls behind it "
    "as she had done every morning since the war. There were nine today. A boy asked her why she "
    "counted them, and she said that somebody had to, or they would not know how many they were. "
    "He thought about this until the island came in sight, and then he asked who counted her. "
    "She laughed so loudly that the captain looked down from his bridge, and for the rest of that "
    "summer the two of them stood there side by side, she with her gulls and he with a notebook. "
)
WORDS = STORY.split()
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do plants make their food?",
    "Write a line about the sea.",
    "Name three animals of the desert.",
    "How does a bicycle stay upright?",
    "What is a prime number?",
    "Who wrote the first computer program?",
    "How far away is the moon?",
    f"What did the boy ask? {STORY}",
)


@dataclass(frozen=True, slots=True)
class Box:
    """One machine: a llama-server, the folder of its slots, and the courier beside it."""

    name: str
    url: str
    courier: ServedCourier

    def entry(self, role: str) -> dict[str, str]:
        return {"url": self.url, "name": self.name, "role": role, "courier": self.courier.url}

    def get(self, path: str) -> Any:
        answer = httpx.get(f"{self.url}{path}", timeout=WAIT_S)
        assert answer.status_code == 200
        return answer.json()

    @property
    def process(self) -> str:
        """What every process of the server draws anew."""
        return str(self.get("/props")["media_marker"])


@contextlib.contextmanager
def box(name: str, home: Path, gguf: Path, *flags: object) -> Iterator[Box]:
    slots = home / name
    slots.mkdir(parents=True, exist_ok=True)
    port = free_port()
    names = ("--model", gguf, "--alias", MODEL, "--host", "127.0.0.1", "--port", port)
    size = ("--threads", 1, "--threads-batch", 1, "--ctx-size", 4096, "--no-ui")
    more = ("--slot-save-path", slots, *flags)
    with running("llama-server", port, program("llama-cpp"), *names, *size, *more) as url:
        with ServedCourier(slots, model=gguf) as courier:
            yield Box(name, url, courier)


@pytest.fixture(scope="module")
def boxes(model_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Box, Box]]:
    home = tmp_path_factory.mktemp("llama")
    with box("p", home, model_gguf, *SAFE, "--parallel", 2) as p:
        with box("d", home, model_gguf, *SAFE, "--parallel", 4) as d:
            yield p, d


@dataclass(frozen=True, slots=True)
class Pair:
    """The router before the two boxes."""

    router: LoopbackRouter
    p: Box
    d: Box

    async def ask(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        known = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
        answer = await self.router.client.post(path, json={**known, **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def whole(self, path: str, body: dict[str, Any]) -> str:
        """The decode worker's own answer, computed from nothing."""
        answer = await self.ask(path, {**body, "cache_prompt": False}, WHOLE)
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        assert answer.json()["timings"]["cache_n"] == 0
        return text_of(answer.json())


@pytest.fixture
async def pair(boxes: tuple[Box, Box]) -> AsyncIterator[Pair]:
    """A router of its own for every test, and nothing left behind after it."""
    p, d = boxes
    processes = p.process, d.process
    async with LoopbackRouter(p.entry("prefill"), d.entry("decode")) as router:
        router.client.timeout = WAIT_S
        yield Pair(router, p, d)
        await router.idle()
        await router.until(lambda: p.courier.files() == d.courier.files() == [])
        await free(router, p, d)
    assert (p.process, d.process) == processes, "a server was started anew: it had crashed"


async def free(router: LoopbackRouter, *all_boxes: Box) -> None:
    """Wait until no slot is in use, by the servers' own account."""
    async with asyncio.timeout(WAIT_S), httpx.AsyncClient() as client:
        for each in all_boxes:
            while True:
                slots = (await client.get(f"{each.url}/slots")).json()
                if not any(slot["is_processing"] for slot in slots):
                    break
    backends: dict[str, Any] = dict(router.app.dispatcher.backends)
    for backend in backends.values():
        assert backend._standing.handover.slots.leased == 0


def text_of(answer: dict[str, Any]) -> str:
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def thirty_requests() -> list[tuple[str, dict[str, Any]]]:
    """Texts of different length with different beginnings, and chats.

    A prompt of which the prefill worker knew the beginning would be computed in other pieces than
    a whole one, and a piece of another size is rounded in another way.
    """
    starts = [(7 * n) % 60 for n in range(20)]
    pieces = [WORDS[start : start + 6 + 4 * n] for n, start in enumerate(starts)]
    texts = [(COMPLETIONS, {"prompt": " ".join(piece)}) for piece in pieces]
    chats = [(CHAT, {"messages": [{"role": "user", "content": each}]}) for each in QUESTIONS]
    assert len(texts) + len(chats) == 30
    return [*texts, *chats]


async def test_thirty_prompts_are_answered_as_if_whole(pair: Pair) -> None:
    differing, recomputed = [], []
    for path, body in thirty_requests():
        whole = await pair.whole(path, body)
        answer = await pair.ask(path, body, SPLIT)
        assert answer.headers["x-splitserve-workers"] == "prefill=p,decode=d"
        told = answer.json()
        if text_of(told) != whole:
            differing.append((body, whole, text_of(told)))
        prompt_tokens = told["usage"]["prompt_tokens"]
        if (told["timings"]["cache_n"], told["timings"]["prompt_n"]) != (prompt_tokens - 1, 1):
            recomputed.append(told["timings"])
        record = await pair.router.record(answer)
        assert record["failures"] == []
        assert record["actual"]["recomputed_tokens"] == 0
    assert recomputed == []
    assert differing == []


async def test_streams_at_once(pair: Pair) -> None:
    """More of them than slots, of both plans: all whole, none computed twice."""
    bodies = [{"prompt": f"{n}. {' '.join(WORDS[:20])}", "stream": True} for n in range(8)]
    plans = [SPLIT, SPLIT, SPLIT, WHOLE] * 2
    answers = await asyncio.gather(
        *(pair.ask(COMPLETIONS, body, plan) for body, plan in zip(bodies, plans, strict=True))
    )
    for answer, plan in zip(answers, plans, strict=True):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers["x-splitserve-plan"] == plan["x-splitserve-plan"]
        record = await pair.router.record(answer)
        assert record["actual"]["output_tokens"] == OUTPUT_TOKENS
        assert record["actual"]["recomputed_tokens"] in (0, None)


# --- files that are not what was saved -----------------------------------------------------------

PROMPT = {"prompt": " ".join(WORDS[:24])}


def cut(content: bytes) -> bytes:
    return content[:-1]


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x40]) + content[middle + 1 :]


def foreign(content: bytes) -> bytes:
    return (b"GGUF" * (len(content) // 4 + 1))[: len(content)]


def other_tokens(content: bytes) -> bytes:
    """A whole and well-formed file of the same size, of another prompt."""
    first = 12 + 3 * 4
    changed = (int.from_bytes(content[first : first + 4], "little") + 1).to_bytes(4, "little")
    return content[:first] + changed + content[first + 4 :]


TAMPERING = [cut, halved, flipped, foreign, other_tokens]
Tamper = Callable[[bytes], bytes]


def change(courier: ServedCourier, tamper: Tamper) -> None:
    (name,) = courier.files()
    path = courier.folder / name
    path.write_bytes(tamper(path.read_bytes()))


async def assert_refused(pair: Pair, why: str) -> None:
    """Ask for a split that cannot succeed: the answer is right all the same, from a whole run."""
    whole = await pair.whole(COMPLETIONS, PROMPT)
    answer = await pair.ask(COMPLETIONS, PROMPT, {})
    record = await pair.router.record(answer)
    assert record["failures"], "the file was not refused"
    assert why in record["failures"][0]
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    assert text_of(answer.json()) == whole


@pytest.fixture
async def eager(pair: Pair) -> Pair:
    """A router that takes the split plan by itself: it has seen that prefill is fast there."""
    answer = await pair.ask(COMPLETIONS, PROMPT, {})
    assert answer.headers["x-splitserve-plan"] == "disaggregated"
    return pair


@pytest.mark.parametrize("tamper", TAMPERING)
async def test_a_file_changed_in_the_prefill_folder(eager: Pair, tamper: Tamper) -> None:
    backend: Any = eager.router.app.dispatcher.backends["d"]
    decode = backend.decode

    async def changed(call: Any, handoff: Handoff | None) -> Any:
        if handoff is not None:
            change(eager.p.courier, tamper)
        return await decode(call, handoff)

    backend.decode = changed
    await assert_refused(eager, "HTTP 409")


async def test_a_file_swapped_in_the_decode_folder(eager: Pair) -> None:
    """After the courier's check, the worst that leaves a server alive: whole, of another prompt."""
    await eager.ask(COMPLETIONS, {"prompt": "A much shorter one."}, SPLIT)
    server: Any = eager.router.app.dispatcher.backends["d"]._standing.server  # type: ignore[attr-defined]
    restore = server.restore

    async def swapped(slot: int, name: str) -> Any:
        async with httpx.AsyncClient(base_url=eager.p.url, timeout=WAIT_S) as client:
            wish = {"prompt": "A much shorter one.", "n_predict": 0, "id_slot": 0}
            assert (await client.post("/completion", json=wish)).status_code == 200
            saving = await client.post("/slots/0?action=save", json={"filename": "other"})
        assert saving.status_code == 200
        (eager.p.courier.folder / "other").replace(eager.d.courier.folder / name)
        return await restore(slot, name)

    server.restore = swapped
    await assert_refused(eager, "instead of what was sent")


@contextlib.contextmanager
def between(courier: ServedCourier, tamper: Tamper) -> Iterator[str]:
    """Somebody between two couriers, who passes on all requests and changes the files."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def pass_on(self) -> None:
            length = int(self.headers.get("content-length", 0))
            reply = httpx.request(
                self.command,
                courier.url + self.path,
                content=self.rfile.read(length),
                headers={k: v for k, v in self.headers.items() if k.lower() != "host"},
            )
            is_file = self.command == "GET" and self.path.startswith("/files/")
            content = tamper(reply.content) if is_file else reply.content
            self.send_response(reply.status_code)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)

        do_GET = do_POST = do_DELETE = pass_on  # noqa: N815 - named by http.server

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("tamper", TAMPERING)
async def test_a_file_changed_on_its_way(boxes: tuple[Box, Box], tamper: Tamper) -> None:
    p, d = boxes
    with between(p.courier, tamper) as url:
        workers = {**p.entry("prefill"), "courier": url}, d.entry("decode")
        async with LoopbackRouter(*workers) as router:
            router.client.timeout = WAIT_S
            await assert_refused(Pair(router, p, d), "HTTP 409")
            await router.idle()
            await router.until(lambda: p.courier.files() == d.courier.files() == [])
            await free(router, p, d)


# --- clients that leave --------------------------------------------------------------------------

LONG = {"model": MODEL, "prompt": STORY * 2, "max_tokens": 200, "temperature": 0, "stream": True}
LEAD = ("x-splitserve-plan: disaggregated",)


async def leave(pair: Pair, when: Callable[[RawClient], Any]) -> None:
    """Ask, leave when `when` returns, and see the next request served in the same slots."""
    async with RawClient(pair.router.url) as client:
        client.post(COMPLETIONS, json.dumps(LONG).encode(), LEAD)
        await when(client)
    await pair.router.until(lambda: pair.router.app.dispatcher.live == 0)
    await free(pair.router, pair.p, pair.d)
    answer = await pair.ask(COMPLETIONS, PROMPT, SPLIT)
    assert answer.headers["x-splitserve-plan"] == "disaggregated"


async def test_a_client_that_leaves_during_prefill(pair: Pair) -> None:
    async def busy(_: RawClient) -> None:
        async with asyncio.timeout(WAIT_S), httpx.AsyncClient(timeout=WAIT_S) as client:
            while not any(
                slot["is_processing"] for slot in (await client.get(f"{pair.p.url}/slots")).json()
            ):
                pass

    await leave(pair, busy)


async def test_a_client_that_leaves_during_the_transfer(pair: Pair) -> None:
    backends: Any = pair.router.app.dispatcher.backends
    courier = backends["d"]._standing._courier
    pull, begun = courier.pull, asyncio.Event()

    async def slow(parcel: Any) -> None:
        begun.set()
        courier.pull = pull
        await asyncio.Event().wait()

    courier.pull = slow

    async def moving(_: RawClient) -> None:
        await asyncio.wait_for(begun.wait(), WAIT_S)

    await leave(pair, moving)


async def test_a_client_that_leaves_in_mid_answer(pair: Pair) -> None:
    async def speaking(client: RawClient) -> None:
        async with asyncio.timeout(WAIT_S):
            while b'"text"' not in client.received:
                await client.some(len(client.received) + 1)

    await leave(pair, speaking)


# --- servers that cannot -------------------------------------------------------------------------


async def test_flags_that_would_lose_kv_are_refused_by_name(
    model_gguf: Path, tmp_path: Path, boxes: tuple[Box, Box]
) -> None:
    _, d = boxes
    with (
        box("wiped", tmp_path, model_gguf) as wiped,
        box("other", tmp_path, model_gguf, "--parallel", 2, "--flash-attn", "off") as other,
    ):
        workers = wiped.entry("prefill"), other.entry("prefill"), d.entry("decode")
        async with LoopbackRouter(*workers) as router:
            told = (await router.client.get("/admin/workers")).json()["workers"]
            by_name = {worker["id"]: worker for worker in told}
            assert "--no-cache-idle-slots" in by_name["wiped"]["why_whole"]
            assert by_name["other"]["why_whole"] is None
            refused = {pair["with"]: pair["why_not"] for pair in by_name["d"]["pairs"]}
            assert "streams (2 / 1)" in refused["other"]
            assert "v_order (columns / rows)" in refused["other"]
            await router.idle()
