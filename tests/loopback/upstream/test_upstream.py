"""The upstream client against a fake worker, over real sockets."""

import asyncio
import json
import socket
import ssl

import pytest

from router.errors import ClosedEarly, ConnectFailed
from router.origin import Origin, parse_origin
from router.testing.fake_openai import FakeOpenAI
from router.testing.script import Script
from router.upstream import DEFAULT_DEADLINES, HttpResponse, HttpUpstream
from router.wire import Deadlines, Headers

CHAT = b"/v1/chat/completions"


def chat_body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": [], **fields}).encode()


STREAM_4 = chat_body(stream=True, max_tokens=4)


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


async def post_and_read(upstream: HttpUpstream, origin: Origin) -> bytes:
    return await read(await post(upstream, origin))


# what passes through


async def test_plain_answer_has_status_headers_and_body(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    fake.set_script(Script(headers={"X-Engine": "fake"}))
    response = await post(upstream, parse_origin(fake.url), chat_body(max_tokens=3))
    assert response.status == 200
    assert (b"x-engine", b"fake") in response.headers
    body = await read(response)
    assert dict(response.headers)[b"content-length"] == str(len(body)).encode()
    assert json.loads(body)["choices"][0]["message"]["content"] == "w0 w1 w2 "


async def test_error_status_is_an_answer(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    fake.set_script(Script(status=429, headers={"retry-after": "7"}))
    response = await post(upstream, parse_origin(fake.url))
    assert response.status == 429
    assert (b"retry-after", b"7") in response.headers
    assert json.loads(await read(response))["error"]["message"] == "scripted 429"


@pytest.mark.parametrize("split_bytes", [0, 1, 7])
async def test_stream_bytes_are_the_same_however_they_are_cut(
    fake: FakeOpenAI, upstream: HttpUpstream, split_bytes: int
) -> None:
    origin = parse_origin(fake.url)
    fake.enqueue(Script(framing="length"), Script(split_bytes=split_bytes))
    whole = await read(await post(upstream, origin))
    streamed = await read(await post(upstream, origin))
    assert streamed.replace(b"chatcmpl-2", b"chatcmpl-1") == whole
    assert streamed.endswith(b"data: [DONE]\n\n")


async def test_first_chunk_comes_before_the_second_is_sent(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    fake.set_script(Script(silent_after_chunks=1))
    async with await post(upstream, parse_origin(fake.url)) as response:
        async with asyncio.timeout(5):
            first = await anext(response)
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == "w0 "


async def test_stream_that_ends_by_close_is_whole(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    fake.set_script(Script(framing="close"))
    origin = parse_origin(fake.url)
    assert (await read(await post(upstream, origin))).count(b"data: ") == 5
    assert upstream.pool(origin).idle == 0


async def test_body_and_headers_arrive_unchanged_but_for_hop_by_hop(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    body = b'{ "model":"m","messages": [],\n "x" : 1.50, "big":"' + b"a" * 3_000_000 + b'"}'
    headers = [
        (b"content-type", b"application/json"),
        (b"x-own", b"kept"),
        (b"host", b"client.example"),
        (b"content-length", b"1"),
        (b"connection", b"close"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
    ]
    origin = parse_origin(fake.url)
    await read(await post(upstream, origin, body, headers=headers))
    (request,) = fake.requests
    assert request.body == body
    assert request.headers == {
        "content-type": "application/json",
        "x-own": "kept",
        "host": origin.authority.decode(),
        "content-length": str(len(body)),
    }


async def test_answers_hop_by_hop_headers_are_dropped(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    extra = {"connection": "keep-alive, x-hop", "keep-alive": "timeout=5", "x-hop": "1"}
    fake.set_script(Script(headers={**extra, "x-end": "2"}))
    response = await post(upstream, parse_origin(fake.url))
    names = {name for name, _ in response.headers}
    assert b"x-end" in names
    assert not names & {b"connection", b"keep-alive", b"x-hop", b"transfer-encoding"}
    response.close()


async def test_line_break_in_a_header_is_refused(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    origin = parse_origin(fake.url)
    with pytest.raises(ValueError, match="line break"):
        await post(upstream, origin, headers=[(b"x", b"1\r\nx-evil: 2")])
    assert fake.requests == []
    assert upstream.pool(origin).in_use == 0


async def test_interim_answer_is_skipped(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    interim = "HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    fake.set_script(Script(raw=f"{interim}HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"))
    response = await post(upstream, parse_origin(fake.url))
    assert (response.status, response.headers) == (200, [(b"content-length", b"2")])
    assert await read(response) == b"ok"


async def test_base_path_precedes_the_route(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    response = await post(upstream, parse_origin(f"{fake.url}/engines/a/v1"))
    assert response.status == 404
    response.close()
    assert fake.requests[0].path == "/engines/a/v1/chat/completions"


async def test_both_sides_have_no_delay(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    made: list[asyncio.Transport] = []
    loop = asyncio.get_running_loop()
    create = loop.create_connection

    async def spy(*args: object, **kwargs: object) -> object:
        transport, protocol = await create(*args, **kwargs)  # type: ignore[call-overload]
        made.append(transport)
        return transport, protocol

    loop.create_connection = spy  # type: ignore[method-assign, assignment]
    await read(await post(upstream, parse_origin(fake.url)))
    sock = made[0].get_extra_info("socket")
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


# cancellation


@pytest.mark.parametrize(
    "script", [Script(silent=True), Script(header_delay_s=60), Script(silent_after_chunks=1)]
)
async def test_cancelling_reaches_the_worker(
    fake: FakeOpenAI, upstream: HttpUpstream, script: Script
) -> None:
    fake.set_script(script)
    origin = parse_origin(fake.url)
    task = asyncio.create_task(post_and_read(upstream, origin))
    await fake.until(
        lambda f: (
            bool(f.requests) and f.requests[0].chunks_sent == (script.silent_after_chunks or 0)
        )
    )
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake.until(lambda f: f.open_connections == 0, timeout_s=1.0)
    assert fake.requests[0].outcome == "client_gone"
    assert fake.open_streams == 0
    assert (upstream.pool(origin).idle, upstream.pool(origin).in_use) == (0, 0)


async def test_closing_in_mid_stream_reaches_the_worker_and_a_waiting_reader(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    fake.set_script(Script(silent_after_chunks=1))
    response = await post(upstream, parse_origin(fake.url))
    await anext(response)
    reader = asyncio.ensure_future(anext(response))
    await asyncio.sleep(0)  # lets the reader begin to wait
    response.close()
    with pytest.raises(ClosedEarly, match="closed by this router"):
        await reader
    await fake.until(lambda f: f.open_connections == 0, timeout_s=1.0)
    assert fake.requests[0].outcome == "client_gone"


# addresses


async def test_ipv6_worker(upstream: HttpUpstream) -> None:
    async with FakeOpenAI(host="::1") as fake:
        assert fake.url.startswith("http://[::1]:")
        origin = parse_origin(fake.url)
        await read(await post(upstream, origin))
        assert fake.requests[0].headers["host"] == f"[::1]:{origin.port}"


async def test_https_worker() -> None:
    trustme = pytest.importorskip("trustme", reason="trustme makes the certificates")
    authority = trustme.CA()
    server, client = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        ssl.create_default_context(),
    )
    authority.issue_cert("127.0.0.1").configure_cert(server)
    async with FakeOpenAI(tls=server) as fake:
        stranger = HttpUpstream()
        with pytest.raises(ConnectFailed, match="certificate"):
            await post(stranger, parse_origin(fake.url))
        authority.configure_trust(client)
        upstream = HttpUpstream(tls=client)
        for _ in range(2):
            body = await read(await post(upstream, parse_origin(fake.url)))
            assert body.endswith(b"data: [DONE]\n\n")
        upstream.close()


async def test_plain_text_to_a_tls_port_is_an_error(upstream: HttpUpstream) -> None:
    async with FakeOpenAI() as fake:
        with pytest.raises(ConnectFailed):
            await post(upstream, parse_origin(fake.url.replace("http:", "https:")))


async def test_linger_reset_is_what_the_rst_knob_sends(fake: FakeOpenAI) -> None:
    """The knob itself: a raw client must see a reset, not an end of stream."""
    fake.set_script(Script(cut_before_headers=True, cut="rst"))
    origin = parse_origin(fake.url)
    reader, writer = await asyncio.open_connection(origin.host, origin.port)
    writer.write(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n")
    with pytest.raises(ConnectionResetError):
        await reader.read()
    writer.close()
