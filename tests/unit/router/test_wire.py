"""The client connection on a recording transport: orders of events a socket rarely gives."""

import asyncio
from unittest.mock import MagicMock

import pytest

from router.errors import ClosedEarly
from router.wire import Deadlines, HttpConnection, end_to_end

REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def started() -> tuple[HttpConnection, MagicMock]:
    connection = HttpConnection("http://w:1", lambda _: None)
    transport = MagicMock()
    transport.get_write_buffer_size.return_value = 0
    connection.connection_made(transport)
    connection.start((b"head", b"body"), Deadlines())
    return connection, transport


async def test_answer_in_single_bytes_is_whole() -> None:
    connection, _ = started()
    for i in range(len(REPLY)):
        connection.data_received(REPLY[i : i + 1])
    assert await connection.head() == (200, [(b"content-length", b"2")])
    assert await connection.chunk() == b"ok"
    assert await connection.chunk() == b""
    assert connection.finish()


async def test_closing_under_a_woken_reader_never_reuses_the_connection() -> None:
    """The reader has been woken but has not run: the next request's bytes would go to it."""
    connection, transport = started()
    connection.data_received(REPLY[:-2])
    await connection.head()
    reader = asyncio.ensure_future(connection.chunk())
    await asyncio.sleep(0)
    connection.data_received(b"ok")
    assert not connection.finish()
    transport.abort.assert_called_once()
    assert await reader == b"ok"


async def test_answer_before_the_whole_request_is_sent_ends_the_connection() -> None:
    connection, transport = started()
    connection.data_received(REPLY)
    await connection.head()
    transport.get_write_buffer_size.return_value = 10
    assert not connection.finish()
    transport.abort.assert_called_once()


async def test_bytes_nobody_asked_for_end_the_connection() -> None:
    connection, transport = started()
    connection.data_received(REPLY)
    assert connection.finish()
    connection.data_received(REPLY)
    transport.abort.assert_called_once()


async def test_what_came_before_a_failure_is_handed_out_first() -> None:
    connection, _ = started()
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nab")
    connection.connection_lost(ConnectionResetError())
    assert (await connection.head())[0] == 200
    assert await connection.chunk() == b"ab"
    with pytest.raises(ClosedEarly, match="reset"):
        await connection.chunk()
    assert not connection.finish()


async def test_trailers_are_not_headers() -> None:
    connection, _ = started()
    connection.data_received(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nx-late: 1\r\n\r\n"
    )
    assert await connection.head() == (200, [])
    assert await connection.chunk() == b"ok"
    assert await connection.chunk() == b""
    assert connection.finish()


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
async def test_status_without_a_body_ends_with_its_head(status: bytes) -> None:
    connection, _ = started()
    connection.data_received(b"HTTP/1.1 " + status + b"\r\n\r\n")
    await connection.head()
    assert await connection.chunk() == b""
    assert connection.finish()


def test_fields_that_connection_names_are_dropped_too() -> None:
    fields = [(b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"x", b"2"), (b"te", b"a")]
    assert end_to_end(fields) == [(b"x", b"2")]
