"""Two machines with a real llama-server and a courier each, and the real router before them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.process_tree import free_port
from router.testing.loopback_router import LoopbackRouter
from tests.engines.conftest import MODEL, program, running
from workers.courier.testing.served_courier import ServedCourier

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SPLIT = {"x-splitserve-plan": "disaggregated"}
WHOLE = {"x-splitserve-plan": "aggregated", "x-splitserve-worker": "d"}
SAFE = ("--kv-unified", "--no-cache-idle-slots", "--flash-attn", "on", "--metrics", "--slots")
OUTPUT_TOKENS = 8
WAIT_S = 60.0
KNOWN = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "temperature": 0}
STORY = (
    "The ferry left the harbour at six, and the old woman at the rail counted the gulls behind it "
    "as she had done every morning since the war. There were nine today. A boy asked her why she "
    "counted them, and she said that somebody had to, or they would not know how many they were. "
    "He thought about this until the island came in sight, and then he asked who counted her. "
    "She laughed so loudly that the captain looked down from his bridge, and for the rest of that "
    "summer the two of them stood there side by side, she with her gulls and he with a notebook. "
)
WORDS = STORY.split()


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

    def post(self, path: str, body: dict[str, Any]) -> Any:
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def forget(self) -> None:
        """Empty its slots: what lies in them changes in which pieces a prompt is computed."""
        for slot in self.get("/slots"):
            self.post(f"/slots/{slot['id']}?action=erase", {})

    def in_two_pieces(self, prompt: str) -> str:
        """Its own answer to a prompt whose last token is computed apart from the others."""
        ids = self.post("/tokenize", {"content": prompt, "add_special": True})["tokens"]
        self.forget()
        self.post("/completion", {"prompt": ids[:-1], "n_predict": 0, "id_slot": 0})
        told = self.post(COMPLETIONS, {**KNOWN, "prompt": prompt, "id_slot": 0})
        assert told["timings"]["cache_n"] == len(ids) - 1
        return text_of(told)

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


@contextlib.contextmanager
def two_boxes(home: Path, gguf: Path) -> Iterator[tuple[Box, Box]]:
    """The prefill worker's and the decode worker's, with other numbers of slots."""
    with box("p", home, gguf, *SAFE, "--parallel", 2) as p:
        with box("d", home, gguf, *SAFE, "--parallel", 4) as d:
            yield p, d


@contextlib.asynccontextmanager
async def routed(*workers: dict[str, str]) -> AsyncIterator[LoopbackRouter]:
    """A router that all of these have joined, however long that takes them."""
    async with LoopbackRouter(*workers, wait=False) as router:
        router.client.timeout = WAIT_S
        members = router.app.registry.members.values()
        await router.until(lambda: all(member.alive for member in members), WAIT_S)
        yield router
        await router.idle()


@dataclass(frozen=True, slots=True)
class Pair:
    """The router before the two boxes."""

    router: LoopbackRouter
    p: Box
    d: Box

    async def ask(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        answer = await self.router.client.post(path, json={**KNOWN, **body}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The decode worker's own answer, computed from nothing."""
        answer = await self.ask(path, {**body, "cache_prompt": False}, WHOLE)
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        told: dict[str, Any] = answer.json()
        assert told["timings"]["cache_n"] == 0
        return told

    async def split(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a split request; all of the prompt but its last token was handed over."""
        self.p.forget()
        self.d.forget()
        answer = await self.ask(path, body, SPLIT)
        assert answer.headers["x-splitserve-workers"] == "prefill=p,decode=d"
        told: dict[str, Any] = answer.json()
        assert told["timings"]["cache_n"] == told["usage"]["prompt_tokens"] - 1
        assert told["timings"]["prompt_n"] == 1
        record = await self.router.record(answer)
        assert record["failures"] == []
        assert record["actual"]["recomputed_tokens"] == 0
        return told


@contextlib.asynccontextmanager
async def paired(p: Box, d: Box) -> AsyncIterator[Pair]:
    """A router of its own, and afterwards nothing is left behind and no server has crashed."""
    processes = p.process, d.process
    async with routed(p.entry("prefill"), d.entry("decode")) as router:
        yield Pair(router, p, d)
        await free(router, p, d)
    assert (p.process, d.process) == processes, "a server was started anew: it had crashed"


async def free(router: LoopbackRouter, *all_boxes: Box) -> None:
    """Wait until no slot is in use, by the servers' own account, and no file is left."""
    couriers = [each.courier for each in all_boxes]
    await router.until(lambda: not any(courier.files() for courier in couriers), WAIT_S)
    async with asyncio.timeout(WAIT_S), httpx.AsyncClient(timeout=WAIT_S) as client:
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
