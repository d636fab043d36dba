"""The upstream client's connections: kept, replaced, bounded, never leaked; over real sockets."""

import asyncio
import json

import pytest

from router.errors import ClosedEarly, LimitReached
from router.origin import Origin, parse_origin
from router.testing.fake_openai import FakeOpenAI
from router.testing.script import Cut, Script
from router.upstream import DEFAULT_DEADLINES, HttpResponse, HttpUpstream, PoolState
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


async def test_connection_is_kept_and_used_again(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    origin = parse_origin(fake.url)
    for _ in range(5):
        await read(await post(upstream, origin))
    assert fake.connections_seen == 1
    assert upstream.pool(origin) == PoolState(idle=1, in_use=0, limit=4096)


async def test_parallel_requests_have_a_connection_each(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    origin = parse_origin(fake.url)
    bodies = await asyncio.gather(*[_post_and_read(upstream, origin) for _ in range(50)])
    assert {body.count(b"data: ") for body in bodies} == {5}
    assert upstream.pool(origin).in_use == 0
    assert fake.open_connections == upstream.pool(origin).idle


async def _post_and_read(upstream: HttpUpstream, origin: Origin) -> bytes:
    return await read(await post(upstream, origin))


async def test_over_the_limit_is_refused_at_once_and_frees_again(fake: FakeOpenAI) -> None:
    upstream = HttpUpstream(limit=2)
    origin = parse_origin(fake.url)
    fake.set_script(Script(silent_after_chunks=1))
    held = [await post(upstream, origin) for _ in range(2)]
    with pytest.raises(LimitReached) as caught:
        await post(upstream, origin)
    assert f"{origin.url}: 2 requests are in flight" in str(caught.value)
    held[0].close()
    held.append(await post(upstream, origin))
    for response in held:
        response.close()
    assert upstream.pool(origin).in_use == 0
    upstream.close()


@pytest.mark.parametrize("cut", ["fin", "rst"])
async def test_idle_connection_the_worker_closed_is_not_used_again(
    fake: FakeOpenAI, upstream: HttpUpstream, cut: Cut
) -> None:
    origin = parse_origin(fake.url)
    await read(await post(upstream, origin))
    assert fake.drop_idle(cut) == 1
    # Without a turn of the loop in between: the client cannot know yet, the request goes out.
    assert upstream.pool(origin).idle == 1
    await read(await post(upstream, origin))
    assert fake.connections_seen == 2


@pytest.mark.parametrize("cut", ["fin", "rst"])
async def test_request_on_a_pooled_connection_is_retried_once_when_no_byte_came(
    fake: FakeOpenAI, upstream: HttpUpstream, cut: Cut
) -> None:
    origin = parse_origin(fake.url)
    await read(await post(upstream, origin))
    fake.enqueue(Script(cut_before_headers=True, cut=cut))
    assert (await read(await post(upstream, origin))).count(b"data: ") == 5
    assert (len(fake.requests), fake.connections_seen) == (3, 2)
    fake.enqueue(*[Script(cut_before_headers=True, cut=cut)] * 3)
    with pytest.raises(ClosedEarly):
        await post(upstream, origin)
    assert len(fake.requests) == 5
    assert upstream.pool(origin).in_use == 0


async def test_retry_takes_a_new_connection_and_leaves_the_pool_alone(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    origin = parse_origin(fake.url)
    held = [await post(upstream, origin) for _ in range(2)]
    for response in held:
        await read(response)
    assert upstream.pool(origin).idle == 2
    fake.enqueue(Script(cut_before_headers=True))
    await read(await post(upstream, origin))
    assert fake.connections_seen == 3
    assert upstream.pool(origin) == PoolState(idle=2, in_use=0, limit=4096)


async def test_connection_the_worker_closed_leaves_the_pool(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    origin = parse_origin(fake.url)
    await read(await post(upstream, origin))
    fake.drop_idle()
    async with asyncio.timeout(5):
        while upstream.pool(origin).idle:  # noqa: ASYNC110 - a pool tells nobody
            await asyncio.sleep(0)
    await read(await post(upstream, origin))
    assert upstream.pool(origin).idle == 1


async def test_new_connection_is_not_retried(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    fake.enqueue(Script(cut_before_headers=True))
    with pytest.raises(ClosedEarly) as caught:
        await post(upstream, parse_origin(fake.url))
    assert caught.value.received_bytes == 0
    assert len(fake.requests) == 1


async def test_not_retried_once_a_byte_came(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    origin = parse_origin(fake.url)
    await read(await post(upstream, origin))
    fake.enqueue(Script(raw="HTTP/1.1 200"))
    with pytest.raises(ClosedEarly) as caught:
        await post(upstream, origin)
    assert caught.value.received_bytes == 12
    assert len(fake.requests) == 2


async def test_expired_idle_connection_is_replaced(fake: FakeOpenAI) -> None:
    upstream = HttpUpstream(keep_alive_s=0.0)
    origin = parse_origin(fake.url)
    for _ in range(2):
        await read(await post(upstream, origin))
    assert fake.connections_seen == 2
    await fake.until(lambda f: f.open_connections == 1)
    upstream.close()


async def test_connection_close_is_obeyed(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    fake.set_script(Script(keep_alive=False))
    origin = parse_origin(fake.url)
    await read(await post(upstream, origin))
    assert upstream.pool(origin).idle == 0


async def test_bytes_beyond_the_answer_never_answer_the_next_request(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    one = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
    fake.enqueue(Script(raw=f"{one}ok{one}no"))
    origin = parse_origin(fake.url)
    assert await read(await post(upstream, origin)) == b"ok"
    assert upstream.pool(origin).idle == 0
    assert (await read(await post(upstream, origin))).count(b"data: ") == 5


async def test_forget_closes_idle_connections(fake: FakeOpenAI, upstream: HttpUpstream) -> None:
    origin = parse_origin(fake.url)
    await read(await post(upstream, origin))
    upstream.forget(origin)
    await fake.until(lambda f: f.open_connections == 0)
    assert upstream.pool(origin).idle == 0


async def test_a_connection_in_use_when_forgotten_is_closed_at_its_end(
    fake: FakeOpenAI, upstream: HttpUpstream
) -> None:
    origin = parse_origin(fake.url)
    response = await post(upstream, origin)
    upstream.forget(origin)
    await read(response)
    await fake.until(lambda f: f.open_connections == 0)


async def test_close_ends_requests_in_flight(fake: FakeOpenAI) -> None:
    upstream = HttpUpstream()
    fake.set_script(Script(silent_after_chunks=1))
    async with await post(upstream, parse_origin(fake.url)) as response:
        await anext(response)
        upstream.close()
        with pytest.raises(ClosedEarly):
            await anext(response)
    await fake.until(lambda f: f.open_connections == 0)
