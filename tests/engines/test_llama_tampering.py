"""Whatever happens to a slot file on its way, no server crashes and no answer is wrong."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from splitserve.messages import Handoff
from tests.engines.llama_boxes import (
    COMPLETIONS,
    SPLIT,
    WAIT_S,
    WORDS,
    Box,
    Pair,
    free,
    paired,
    routed,
    text_of,
    two_boxes,
)
from workers.courier.testing.served_courier import ServedCourier

PROMPT = {"prompt": " ".join(WORDS[:24])}


@pytest.fixture(scope="module")
def boxes(model_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Box, Box]]:
    with two_boxes(tmp_path_factory.mktemp("llama"), model_gguf) as both:
        yield both


@pytest.fixture
async def pair(boxes: tuple[Box, Box]) -> AsyncIterator[Pair]:
    async with paired(*boxes) as served:
        yield served


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
    assert text_of(answer.json()) == text_of(whole)


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
        async with routed(*workers) as router:
            await assert_refused(Pair(router, p, d), "HTTP 409")
            await free(router, p, d)
