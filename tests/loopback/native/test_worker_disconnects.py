"""A client that leaves, at any moment: its request is aborted at once and its KV is free."""

import json
import socket
import struct
from collections.abc import Iterator

import pytest

from workers.native.testing.served_worker import MODEL, ServedWorker
from workers.native.testing.waiting import until

ASK = {"messages": [{"role": "user", "content": "hello"}]}
PROMPT = {"prompt": "hello"}
WITHIN_S = 1.0


class Client:
    """One request over a bare socket."""

    def __init__(self, worker: ServedWorker, path: str, **fields: object) -> None:
        question = ASK if path.endswith("chat/completions") else PROMPT
        body = json.dumps({"model": MODEL, "ignore_eos": True} | question | fields).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        self.sock = socket.create_connection(("127.0.0.1", worker.port), 20)
        self.sock.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.seen = b""

    def read_until(self, mark: bytes) -> bytes:
        """Read until `mark` was seen; returns all that came."""
        while mark not in self.seen:
            more = self.sock.recv(65536)
            assert more, f"the server closed after {self.seen!r}"
            self.seen += more
        return self.seen

    def leave(self, *, reset: bool) -> None:
        """Close, or break the connection as a crash does."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.sock.close()


@pytest.fixture(autouse=True)
def gate_is_open_again(worker: ServedWorker) -> Iterator[None]:
    yield
    worker.gate.release()


def assert_aborted(worker: ServedWorker, before: int, choices: int = 1) -> None:
    until(lambda: worker.finished("abort") == before + choices, "it is aborted", WITHIN_S)
    until(worker.idle, "its KV is free", WITHIN_S)


ROUTES = ("/v1/chat/completions", "/v1/completions")
each_route = pytest.mark.parametrize("path", ROUTES)
each_way = pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])


@each_way
@each_route
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_before_the_first_token(worker: ServedWorker, path: str, stream: bool, reset: bool) -> None:
    before = worker.finished("abort")
    worker.gate.hold()
    client = Client(worker, path, stream=stream, max_tokens=200)
    worker.gate.wait_held()
    client.leave(reset=reset)
    worker.gate.hold(after_steps=100)  # it must not need the answer's end to notice
    assert_aborted(worker, before)


@each_way
@each_route
@pytest.mark.parametrize("choices", [1, 3])
def test_in_the_middle_of_a_stream(
    worker: ServedWorker, path: str, reset: bool, choices: int
) -> None:
    before = worker.finished("abort")
    worker.gate.hold(after_steps=8)
    client = Client(worker, path, stream=True, max_tokens=200, n=choices, seed=1)
    client.read_until(b"data: ")
    worker.gate.wait_held()
    client.leave(reset=reset)
    worker.gate.hold(after_steps=100)
    assert_aborted(worker, before, choices)


@each_route
def test_in_the_middle_of_a_whole_answer(worker: ServedWorker, path: str) -> None:
    before = worker.finished("abort")
    worker.gate.hold(after_steps=8)
    client = Client(worker, path, max_tokens=200, n=2)
    worker.gate.wait_held()
    client.leave(reset=False)
    worker.gate.hold(after_steps=100)
    assert_aborted(worker, before, 2)


def test_while_it_waits_in_the_queue(worker: ServedWorker) -> None:
    before = worker.finished("abort")
    worker.gate.hold()
    first = Client(worker, ROUTES[0], max_tokens=3)
    worker.gate.wait_held()
    second = Client(worker, ROUTES[0], max_tokens=3, stream=True)
    until(lambda: worker.engine._inbox.qsize() == 1, "the second is queued")
    second.leave(reset=False)
    until(lambda: worker.engine._inbox.qsize() == 2, "its abort is queued")
    worker.gate.release()
    assert b'"finish_reason":"length"' in first.read_until(b"}}}")
    first.leave(reset=False)
    assert worker.finished("abort") == before + 1


def test_one_of_several_prompts_is_not_left_running(worker: ServedWorker) -> None:
    before = worker.finished("abort")
    worker.gate.hold(after_steps=5)
    client = Client(worker, ROUTES[1], prompt=["a", "bb", "ccc"], max_tokens=150)
    worker.gate.wait_held()
    client.leave(reset=True)
    worker.gate.hold(after_steps=100)
    assert_aborted(worker, before, 3)


def test_in_the_middle_of_the_body(worker: ServedWorker) -> None:
    with socket.create_connection(("127.0.0.1", worker.port), 20) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{"
        sock.sendall(head)
    client = Client(worker, ROUTES[1], max_tokens=1)
    assert b"200 OK" in client.read_until(b"}}}")
    client.leave(reset=False)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("when", ["at once", "after the first line", "when prefill is done"])
def test_a_router_that_leaves_during_prefill(worker: ServedWorker, route: str, when: str) -> None:
    ended = dict(worker.engine.offers.ended)
    worker.gate.hold()
    client = Client(worker, f"/splitserve/prefill{route}", max_tokens=5)
    if when == "after the first line":
        client.read_until(b"}\n")
    worker.gate.wait_held()
    assert worker.engine.offers.live == 1
    if when == "when prefill is done":
        worker.gate.release()
        client.read_until(b"prefill_ms")
    client.leave(reset=False)
    if when == "when prefill is done":  # it may still hand the KV on: the lease decides
        [offer_id] = worker.engine.offers._offers
        assert worker.engine.offers.release(offer_id)
    until(lambda: worker.engine.offers.live == 0, "the offer ends", WITHIN_S)
    worker.gate.release()
    until(worker.idle, "its KV is free", WITHIN_S)
    released = worker.engine.offers.ended["released"] - ended.get("released", 0)
    assert released == 1
