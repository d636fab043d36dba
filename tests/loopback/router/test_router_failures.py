"""Workers that fail, in every phase: what the client gets, what is tried again and recorded."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from router.testing.fake_native import FakeNative, PrefillScript
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter, Split
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m

CHAT = "/v1/chat/completions"
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
STREAM = {**PLAIN, "stream": True}
BODIES = pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])
# The first goes to a kept connection, and so is sent once more over a new one.
DIES = [Script(cut_before_headers=True)] * 2
DEAD = "http://127.0.0.1:9"  # the discard port, where nothing listens


def envelope(answer: httpx.Response) -> dict[str, str]:
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return dict(error)


def events(body: bytes) -> list[bytes]:
    assert body.endswith(b"\n\n")
    return body.removesuffix(b"\n\n").split(b"\n\n")


# --- the prefill leg ------------------------------------------------------------------------------


async def test_prefill_refusal_is_the_clients_answer(split: Split) -> None:
    split.prefill.enqueue_prefill(PrefillScript(status=400, code="context_length_exceeded"))
    answer = await split.router.client.post(CHAT, json=STREAM)
    assert answer.status_code == 400
    assert envelope(answer)["code"] == "context_length_exceeded"
    assert answer.headers["content-type"] == "application/json"
    await split.router.idle()
    assert len(split.prefill.calls("/splitserve/")) == 1
    assert split.decode.calls() == []
    assert split.router.latest()["actual"]["finish"] == "failed"


@pytest.mark.parametrize(
    "script",
    [
        PrefillScript(status=500),
        PrefillScript(status=503),
        PrefillScript(status=429),
        PrefillScript(stop_at="before_offer"),
    ],
    ids=["500", "503", "429", "dies"],
)
async def test_prefill_that_fails_before_its_offer_runs_whole_elsewhere(
    split: Split, script: PrefillScript
) -> None:
    split.prefill.enqueue_prefill(*[script] * 2)  # a kept connection that dies is tried twice
    answer = await split.router.client.post(CHAT, json=STREAM)
    assert answer.status_code == 200
    assert answer.headers["x-splitserve-workers"] == "aggregated=d"
    record = await split.router.record(answer)
    assert record["attempts"] == 2
    (failure,) = record["failures"]
    assert failure.startswith("attempt 1, prefill on p: ")
    await split.router.idle()
    assert split.prefill.offers == {}


async def test_prefill_that_dies_after_its_offer_runs_whole_elsewhere(split: Split) -> None:
    split.prefill.enqueue_prefill(PrefillScript(stop_at="after_offer"))
    split.decode.enqueue(Script(silent=True))  # it waits for KV that never comes
    answer = await split.router.client.post(CHAT, json=STREAM)
    assert answer.status_code == 200
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    await split.router.idle()
    assert [r.consumed for r in split.commands(m.ReleaseKV)] == [False]
    assert [call.outcome for call in split.decode.calls()] == ["client_gone", "done"]


async def test_prefill_that_says_nothing_runs_whole_after_the_deadline() -> None:
    async with FakeNative(role="prefill") as p, FakeNative(role="decode") as d:
        workers = {"url": p.url}, {"url": d.url}
        async with LoopbackRouter(*workers, limits={"first_byte_s": 0.1}) as router:
            p.enqueue_prefill(PrefillScript(stop_at="before_offer", silent=True))
            answer = await router.client.post(CHAT, json=STREAM)
            assert answer.status_code == 200
            (failure,) = (await router.record(answer))["failures"]
            assert "no first byte of an answer within 0.1 s" in failure
            await router.idle()


async def test_engine_that_says_nothing_ends_at_the_deadline() -> None:
    limits = {"first_byte_s": 0.1}
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}, limits=limits) as router:
        engine.enqueue(*[Script(silent=True)] * 3)
        answer = await router.client.post(CHAT, json=PLAIN)
        assert answer.status_code == 504
        assert envelope(answer)["code"] == "worker_timeout"
        assert "first_byte_s" in envelope(answer)["message"]
        await router.idle()
        assert len([r for r in engine.requests if r.method == "POST"]) == 3


# --- the leg that answers -------------------------------------------------------------------------


@BODIES
@pytest.mark.parametrize("code", ["handoff_broken", "handoff_refused", "handoff_corrupt"])
async def test_handoff_that_fails_is_run_again_whole(
    split: Split, code: str, body: dict[str, object]
) -> None:
    split.decode.break_handoffs(code)
    answer = await split.router.client.post(CHAT, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await split.router.record(answer)
    assert record["failures"] == ["attempt 1, decode on d: HTTP 502: the pull failed"]
    await split.router.idle()
    assert split.prefill.offers == {"offer-1": "released"}


@BODIES
@pytest.mark.parametrize("headed", [False, True], ids=["no head", "head, no byte"])
async def test_decode_that_dies_before_its_first_byte_is_tried_again(
    split: Split, body: dict[str, object], headed: bool
) -> None:
    head = "HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n"
    split.decode.enqueue(*([Script(raw=head)] if headed else DIES))
    answer = await split.router.client.post(CHAT, json=body)
    assert answer.status_code == 200
    record = await split.router.record(answer)
    assert record["attempts"] == 2
    assert record["failures"][0].startswith("attempt 1, decode on d: ")
    assert split.prefill.offers["offer-1"] == "released"
    await split.router.idle()


@pytest.mark.parametrize("cut", ["fin", "rst"])
async def test_stream_that_dies_ends_with_an_error_event(split: Split, cut: str) -> None:
    split.decode.enqueue(Script(cut="fin" if cut == "fin" else "rst", cut_after_chunks=2))
    answer = await split.router.client.post(CHAT, json=STREAM)
    assert answer.status_code == 200
    first, second, last = events(answer.content)
    assert b"w0 " in first
    assert b"w1 " in second
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "worker_broke"
    assert error["type"] == "server_error"
    assert b"[DONE]" not in answer.content
    record = await split.router.record(answer)
    assert record["actual"]["finish"] == "broken"
    assert record["attempts"] == 1
    await split.router.idle()


@pytest.mark.parametrize("size", [1, 7, 100, 333])
async def test_stream_that_dies_inside_an_event_never_shows_half_of_it(size: int) -> None:
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}) as router:
        engine.enqueue(Script(split_bytes=size, cut="fin", cut_after_chunks=600 // size))
        answer = await router.client.post(CHAT, json=STREAM)
        for event in events(answer.content):
            assert json.loads(event.removeprefix(b"data: "))
        assert b"worker_broke" in events(answer.content)[-1]
        await router.idle()


@pytest.mark.parametrize("size", [1, 3, 100])
async def test_stream_in_any_cut_comes_back_whole(size: int) -> None:
    fixed = {"id": "fixed"}
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}) as router:
        engine.set_script(Script(split_bytes=size, merge=fixed))
        answer = await router.client.post(CHAT, json=STREAM)
        engine.set_script(Script(merge=fixed))
        direct = await router.client.post(engine.url + CHAT, json=STREAM)
        assert answer.content == direct.content
        await router.idle()


async def test_stream_that_stalls_ends_with_an_error_event() -> None:
    limits = {"idle_s": 0.1}
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}, limits=limits) as router:
        engine.enqueue(Script(silent_after_chunks=1))
        answer = await router.client.post(CHAT, json=STREAM)
        assert len(events(answer.content)) == 2
        assert b"idle_s" in answer.content
        await router.idle()


class Unfinished:
    """The log line of the server for an answer that is left unfinished on purpose."""

    text = "ASGI callable returned without completing response."


async def test_plain_answer_that_dies_is_cut_off(tolerated: list[str]) -> None:
    tolerated.append(Unfinished.text)
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}) as router:
        engine.enqueue(Script(cut="fin"))
        async with RawClient(router.url) as client:
            client.post(CHAT, json.dumps(PLAIN).encode())
            received = await client.end()
        head, _, body = received.partition(b"\r\n\r\n")
        assert received.count(b"HTTP/1.1") == 1
        assert b"data:" not in body
        assert int(dict(httpx.Headers(_fields(head)))["content-length"]) > len(body)
        assert router.latest()["actual"]["finish"] == "broken"
        await router.idle()


def _fields(head: bytes) -> list[tuple[bytes, bytes]]:
    lines = head.split(b"\r\n")[1:]
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]


async def test_stream_of_nothing_is_a_failure() -> None:
    nothing = Script(raw="HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}) as router:
        engine.enqueue(nothing)
        answer = await router.client.post(CHAT, json=STREAM)
        assert answer.content.endswith(b"[DONE]\n\n")
        assert (await router.record(answer))["attempts"] == 2
        engine.enqueue(*[nothing] * 3)
        answer = await router.client.post(CHAT, json=STREAM)
        assert answer.status_code == 502
        assert "no byte of a stream" in envelope(answer)["message"]
        await router.idle()


# --- engines that refuse --------------------------------------------------------------------------


@BODIES
async def test_engine_4xx_is_passed_on_and_not_tried_again(body: dict[str, object]) -> None:
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}) as router:
        engine.set_script(Script(status=422))
        answer = await router.client.post(CHAT, json=body)
        direct = await router.client.post(engine.url + CHAT, json=body)
        assert (answer.status_code, answer.content) == (422, direct.content)
        assert answer.headers["content-type"] == direct.headers["content-type"]
        await router.idle()
        assert len([r for r in engine.requests if r.method == "POST"]) == 2


@pytest.fixture
async def engines() -> AsyncIterator[tuple[FakeOpenAI, FakeOpenAI]]:
    async with FakeOpenAI() as one, FakeOpenAI() as two:
        yield one, two


BUSY = Script(status=429, headers={"retry-after": "7"})


async def test_busy_worker_is_left_for_another(engines: tuple[FakeOpenAI, FakeOpenAI]) -> None:
    one, two = engines
    async with LoopbackRouter(
        {"url": one.url, "name": "a"}, {"url": two.url, "name": "b"}
    ) as router:
        one.enqueue(BUSY)
        two.enqueue(Script(headers={"x-served-by": "b"}))
        answer = await router.client.post(CHAT, json=PLAIN)
        assert answer.headers["x-served-by"] == "b"
        record = await router.record(answer)
        assert record["failures"] == ["attempt 1, aggregated on a: HTTP 429: scripted 429"]
        await router.idle()


async def test_all_busy_is_429_with_the_engines_retry_after(
    engines: tuple[FakeOpenAI, FakeOpenAI],
) -> None:
    async with LoopbackRouter(*({"url": engine.url} for engine in engines)) as router:
        for engine in engines:
            engine.set_script(BUSY)
        answer = await router.client.post(CHAT, json=PLAIN)
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "7"
        assert envelope(answer)["message"] == "scripted 429"
        assert len((await router.record(answer))["failures"]) == 3
        await router.idle()


async def test_answer_is_about_the_last_attempt(engines: tuple[FakeOpenAI, FakeOpenAI]) -> None:
    one, two = engines
    workers = {"url": one.url, "name": "a"}, {"url": two.url, "name": "b"}
    async with LoopbackRouter(*workers, limits={"attempts": 2}) as router:
        one.enqueue(BUSY)
        two.enqueue(*DIES)
        answer = await router.client.post(CHAT, json=PLAIN)
        assert answer.status_code == 502
        assert "aggregated on b" in envelope(answer)["message"]
        await router.idle()


async def test_every_attempt_fails() -> None:
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url, "name": "e"}) as router:
        engine.set_script(Script(status=500))
        answer = await router.client.post(CHAT, json=PLAIN)
        assert answer.status_code == 502
        error = envelope(answer)
        assert error["code"] == "worker_failed"
        assert error["type"] == "server_error"
        assert error["message"] == (
            "aggregated on e: HTTP 500: scripted 500; the worker's log says more"
        )
        assert (await router.record(answer))["attempts"] == 3
        await router.idle()


async def test_worker_that_went_away_is_502_and_soon_503() -> None:
    async with FakeOpenAI() as engine:
        router = LoopbackRouter({"url": engine.url, "name": "e"})
        await router.__aenter__()
    try:
        answer = await router.client.post(CHAT, json=PLAIN)
        assert answer.status_code == 502
        assert "cannot connect" in envelope(answer)["message"]
        # Each failed call had the worker looked at, so it is given up long before its next poll.
        for _ in range(3):
            await router.client.post(CHAT, json=PLAIN)
        await router.until(lambda: not router.app.registry.members["e"].alive)
        answer = await router.client.post(CHAT, json=PLAIN)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert envelope(answer)["code"] == "no_worker"
        await router.idle()
    finally:
        await router.__aexit__(None, None, None)


async def test_word_in_a_model_name_does_not_make_a_timeout() -> None:
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}) as router:
        answer = await router.client.post(CHAT, json={**PLAIN, "model": "deadline-7b"})
        assert answer.status_code == 404
        assert envelope(answer)["code"] == "model_not_found"


async def test_nothing_listens() -> None:
    async with LoopbackRouter({"url": DEAD, "name": "dead"}, wait=False) as router:
        await router.until(lambda: True)
        answer = await router.client.post(CHAT, json=PLAIN)
        assert answer.status_code in (404, 503)
        envelope(answer)


@pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])
async def test_error_of_the_router_itself_is_an_envelope_too(
    body: dict[str, object], tolerated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tolerated.append("request ")
    async with FakeOpenAI() as engine, LoopbackRouter({"url": engine.url}) as router:
        (backend,) = router.app.dispatcher.backends.values()
        monkeypatch.setattr(type(backend), "decode", lambda *_: 1 / 0)
        answer = await router.client.post(CHAT, json=body)
        assert answer.status_code == 500
        assert envelope(answer)["code"] == "internal_error"
        await router.idle()
