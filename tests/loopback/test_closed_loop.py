"""The load client of the relay measurement: it must notice every answer that is not whole."""

import socket

import pytest

from benchmarks.closed_loop import ClosedLoop
from benchmarks.errors import LoadFailed
from benchmarks.prompts import CHAT_PATH
from benchmarks.relay import SHAPES, STREAM, System
from router.testing.fake_openai import FakeOpenAI
from router.testing.script import Script

PLAIN = SHAPES[0]


async def test_every_request_is_sent_once_over_as_many_connections_as_asked(
    fake: FakeOpenAI,
) -> None:
    bodies = PLAIN.bodies(0, 20)
    replies = await ClosedLoop(fake.url, CHAT_PATH).run(bodies, 4)
    assert len(replies) == 20
    assert sorted(request.body for request in fake.requests) == sorted(bodies)
    assert fake.connections_seen == 4
    assert all(0 < reply.first_byte_s <= reply.total_s for reply in replies)


async def test_stream_events_are_counted(fake: FakeOpenAI) -> None:
    system = System("fake", fake.url, None)
    (reply,) = await system.load(STREAM.bodies(0, 1), STREAM, 1)
    assert reply.events == 33


@pytest.mark.parametrize(
    "script, says",
    [
        (Script(status=503), "status 503"),
        (Script(cut="fin", cut_after_chunks=3), "connection lost"),
        (Script(cut="rst", cut_after_chunks=3), "connection lost"),
        (Script(chunks=31), "answered a stream32 request"),
        (Script(done=False), "answered a stream32 request"),
    ],
)
async def test_answer_that_is_not_whole_fails_the_run(
    fake: FakeOpenAI, script: Script, says: str
) -> None:
    fake.set_script(script)
    with pytest.raises(LoadFailed, match=says):
        await System("fake", fake.url, None).load(STREAM.bodies(0, 4), STREAM, 2)


async def test_nobody_listening_fails_the_run() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        loop = ClosedLoop(f"http://127.0.0.1:{sock.getsockname()[1]}", CHAT_PATH)
        with pytest.raises(LoadFailed, match="no connection"):
            await loop.run(PLAIN.bodies(0, 1), 1)
