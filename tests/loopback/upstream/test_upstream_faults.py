"""Faults of a worker as the upstream client reports them, and back-pressure, over real sockets."""

import asyncio
import json
import socket

import pytest

from router.errors import (
    ClosedEarly,
    ConnectFailed,
    LimitReached,
    Malformed,
    ReplyTooLarge,
    TimedOut,
)
from router.origin import Origin, parse_origin
from router.testing.fake_openai import FakeOpenAI
from router.testing.script import Cut, Script
from router.upstream import DEFAULT_DEADLINES, HttpResponse, HttpUpstream
from router.wire import MAX_HEAD_BYTES, PAUSE_BYTES, Deadlines, Headers

CHAT = b"/v1/chat/completions"
SHORT_S = 0.05


def chat_body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [], **fields}).encode()


STREAM_4 = chat_body(stream=True, max_tokens=4)
ENDLESS = chat_body(stream=True, max_tokens=1_000_000)


async def post(
    upstream: HttpUpstream,
    origin: Origin,
    body: bytes = STREAM_4,
    *,
    headers: Headers = (),
    deadlines: Deadlines = DEFAULT_DEADLINES,
) -> HttpResponse:
    return await upstream.request(
        origin, b"POST", CHAT, headers=headers, body=body, deadlines=deadlines
    )


async def read(response: HttpResponse) -> bytes:
    async with response:
        return await response.read(1 << 24)


def assert_one_line(error: Exception, *parts: str) -> None:
    text = str(error)
    assert "\n" not in text
    for part in parts:
        assert part in text


class full_backlog:  # noqa: N801 - used like a function
    """A listening port that accepts no further connection."""

    def __enter__(self) -> str:
        self._server = socket.socket()
        self._server.bind(("127.0.0.1", 0))
        self._server.listen(0)
        port = self._server.getsockname()[1]
        self._clients = []
        for _ in range(4):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            self._clients.append(client)
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *exc: object) -> None:
        for sock in [self._server, *self._clients]:
            sock.close()


async def test_cancelled_connect_is_counted_out(upstream: HttpUpstream) -> None:
    with full_backlog() as url:
        origin = parse_origin(url)
        task = asyncio.create_task(post(upstream, origin))
        await asyncio.sleep(0)  # lets it begin to connect
        assert upstream.pool(origin).in_use == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert upstream.pool(origin).in_use == 0


async def test_connect_deadline(upstream: HttpUpstream) -> None:
    with full_backlog() as url:
        origin = parse_origin(url)
        with pytest.raises(TimedOut) as caught:
            await post(upstream, origin, deadlines=Deadlines(connect_s=SHORT_S))
    assert caught.value.phase == "connect"
    assert_one_line(caught.value, url, "within 0.05 s", "connect_s")
    assert upstream.pool(origin).in_use == 0


async def test_refused_connection(upstream: HttpUpstream) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        origin = parse_origin(url)
        with pytest.raises(ConnectFailed) as caught:
            await post(upstream, origin)
    assert_one_line(caught.value, url, "cannot connect", "start the worker")
    assert upstream.pool(origin).in_use == 0


async def test_unknown_host(upstream: HttpUpstream) -> None:
    with pytest.raises(ConnectFailed) as caught:
        await post(upstream, parse_origin("http://worker.invalid:8000"))
    assert_one_line(caught.value, "http://worker.invalid:8000", "cannot connect")


async def test_no_file_descriptor_left_is_this_routers_limit(
    fake: FakeOpenAI, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none_left(*args: object, **kwargs: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", none_left)
    with pytest.raises(LimitReached, match="ulimit -n"):
        await post(upstream, parse_origin(fake.url))


@pytest.mark.parametrize(
    "script, phase",
    [
        (Script(silent=True), "first_byte"),
        (Script(header_delay_s=60), "first_byte"),
        (Script(first_chunk_delay_s=60), "first_byte"),
        (Script(silent_after_chunks=0), "first_byte"),
        (Script(silent_after_chunks=2), "idle"),
        (Script(chunk_delay_s=60), "idle"),
    ],
)
async def test_silence_ends_by_the_deadline_of_its_phase(
    fake: FakeOpenAI, upstream: HttpUpstream, script: Script, phase: str
) -> None:
    fake.set_script(script)
    origin = parse_origin(fake.url)
    with pytest.raises(TimedOut) as caught:
        await read(
            await post(
                upstream, origin, deadlines=Deadlines(first_byte_s=SHORT_S, idle_s=2 * SHORT_S)
            )
        )
    assert caught.value.phase == phase
    assert_one_line(caught.value, origin.url, f"{phase}_s")
    await fake.until(lambda f: f.open_connections == 0)
    assert upstream.pool(origin).in_use == 0


async def test_idle_bound_holds_under_a_long_first_byte_bound(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    fake.set_script(Script(silent_after_chunks=2))
    deadlines = Deadlines(first_byte_s=60, idle_s=SHORT_S)
    async with asyncio.timeout(5):
        with pytest.raises(TimedOut):
            await read(await post(upstream, parse_origin(fake.url), deadlines=deadlines))


async def test_chunks_that_keep_coming_outlive_idle_but_not_total(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    fake.set_script(Script(chunk_delay_s=0.01))
    deadlines = Deadlines(first_byte_s=0.5, idle_s=0.5, total_s=1.2)
    with pytest.raises(TimedOut) as caught:
        await read(await post(upstream, parse_origin(fake.url), ENDLESS, deadlines=deadlines))
    assert caught.value.phase == "total"
    assert fake.requests[0].chunks_sent > 10


@pytest.mark.parametrize(
    "cut, framing",
    [
        ("fin", "chunked"),
        ("rst", "chunked"),
        ("fin", "length"),
        ("rst", "length"),
        ("rst", "close"),
    ],
)
async def test_cut_answer_is_never_whole(
    fake: FakeOpenAI, upstream: HttpUpstream, cut: Cut, framing: str
) -> None:
    fake.set_script(Script().overridden(json.dumps({"framing": framing})))
    origin = parse_origin(fake.url)
    knobs = json.dumps({"cut": cut, "cut_after_chunks": 2, "framing": framing}).encode()
    received = b""
    response = await post(upstream, origin, headers=[(b"x-fake", knobs)])
    caught: ClosedEarly | None = None
    try:
        async for chunk in response:
            received += chunk
    except ClosedEarly as exc:
        caught = exc
    response.close()
    assert caught is not None
    if framing == "chunked" and cut == "fin":
        assert received.count(b"data: ") == 2
    assert caught.received_bytes > 0
    assert_one_line(caught, origin.url, "unfinished", "log")
    assert upstream.pool(origin).in_use == 0


@pytest.mark.parametrize(
    "raw",
    [
        "SSH-2.0-OpenSSH_9.6\r\n",
        "HTTP/1.1 abc\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nx: " + "a" * (MAX_HEAD_BYTES + 1),
    ],
    ids=["other-protocol", "status", "two-lengths", "negative-length", "endless-head"],
)
async def test_malformed_head(fake: FakeOpenAI, upstream: HttpUpstream, raw: str) -> None:
    fake.set_script(Script(raw=raw))
    origin = parse_origin(fake.url)
    with pytest.raises(Malformed) as caught:
        await post(upstream, origin)
    assert_one_line(caught.value, origin.url, "no valid HTTP")
    assert (upstream.pool(origin).idle, upstream.pool(origin).in_use) == (0, 0)


async def test_malformed_chunk_comes_after_what_was_right(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    fake.set_script(
        Script(raw="HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nzz")
    )
    response = await post(upstream, parse_origin(fake.url))
    assert await anext(response) == b"ok"
    with pytest.raises(Malformed):
        await anext(response)
    response.close()


async def test_read_refuses_more_than_its_limit(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    origin = parse_origin(fake.url)
    async with await post(upstream, origin, ENDLESS) as response:
        with pytest.raises(ReplyTooLarge) as caught:
            await response.read(1000)
    assert_one_line(caught.value, origin.url, "1000 bytes")
    await fake.until(lambda f: f.open_connections == 0)


# back-pressure


async def test_slow_reader_stops_the_worker_and_loses_nothing(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    total = 4000
    fake.set_script(Script(chunks=total, chunk_bytes=10_000))
    deadlines = Deadlines(idle_s=0.2)
    async with await post(upstream, parse_origin(fake.url), deadlines=deadlines) as response:
        received = len(await anext(response))
        await fake.until(lambda f: f.blocked_writers == 1)
        sent = fake.requests[0].chunks_sent
        assert sent < total / 2, "the worker wrote on although nobody read"
        # Our own slowness is not the worker's idleness: the deadline passes and nothing breaks.
        await _loop_time_passes(3 * deadlines.idle_s)
        assert fake.requests[0].chunks_sent == sent
        largest = 0
        async for chunk in response:
            largest = max(largest, len(chunk))
            received += len(chunk)
    assert received > total * 10_000
    assert largest < 3 * PAUSE_BYTES


async def _loop_time_passes(seconds: float) -> None:
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, done.set)
    await done.wait()


async def test_reset_while_our_reader_is_slow_is_an_error_not_an_end(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    fake.set_script(Script(chunks=4000, chunk_bytes=10_000))
    response = await post(upstream, parse_origin(fake.url))
    await fake.until(lambda f: f.blocked_writers == 1)
    assert fake.drop_all("rst") == 1
    with pytest.raises(ClosedEarly):
        await read(response)
