"""Input that is wrong: the right 4xx in the OpenAI envelope, and the server lives."""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawAnswer, RawClient
from router.testing.script import Script

CHAT = "/v1/chat/completions"
LIMIT_BYTES = 1 << 20
MESSAGES = '[{"role":"user","content":"hi"}]'
GOOD = b'{"model":"m","messages":%b}' % MESSAGES.encode()


@pytest.fixture
async def engine() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
async def router(engine: FakeOpenAI) -> AsyncIterator[LoopbackRouter]:
    limits = {"max_body_bytes": LIMIT_BYTES}
    async with LoopbackRouter({"url": engine.url}, limits=limits) as running:
        yield running
        answer = await running.client.post(CHAT, content=GOOD)  # it lives
        assert answer.status_code == 200
        await running.idle()


def assert_refused(answer: RawAnswer, status: int, code: str | None = None) -> dict[str, str]:
    assert answer.status == status, answer.body
    assert answer.complete
    assert answer.header("content-type") == "application/json"
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, str] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 1000
    assert "\n" not in error["message"]
    if code is not None:
        assert error["code"] == code
    return error


def chat(**fields: str) -> bytes:
    """A chat body of raw JSON values."""
    whole = {"model": '"m"', "messages": MESSAGES, **fields}
    return ("{" + ",".join(f'"{k}":{v}' for k, v in whole.items() if v) + "}").encode()


@dataclass(frozen=True)
class Case:
    """A body and what must come of it."""

    name: str
    body: bytes
    status: int = 400
    code: str = "invalid_json"
    param: str | None = None
    path: str = CHAT


def wrong(name: str, param: str | None, body: bytes, code: str = "invalid_value") -> Case:
    return Case(name, body, code=code, param=param)


BROKEN = [
    Case("empty", b""),
    Case("spaces", b"   "),
    Case("no JSON", b"hello"),
    Case("cut short", GOOD[:-1]),
    Case("two values", GOOD + b"{}"),
    Case("single quotes", b"{'model':'m'}"),
    Case("trailing comma", b'{"model":"m",}'),
    Case("comment", b'{"model":"m"/**/}'),
    Case("NaN", chat(temperature="NaN")),
    Case("NaN in messages", chat(messages="[NaN]")),
    Case("Infinity", chat(temperature="-Infinity")),
    Case("leading zero", chat(temperature="01")),
    Case("byte order mark", b"\xef\xbb\xbf" + GOOD),
    Case("UTF-16", GOOD.decode().encode("utf-16")),
    Case("invalid UTF-8 in the model", b'{"model":"\xff"}'),
    Case("invalid UTF-8 in a message", b'{"model":"m","messages":[{"content":"\xc3\x28"}]}'),
    Case("invalid UTF-8 elsewhere", b'{"model":"m","messages":[1],"user":"\xed\xa0\x80"}'),
    Case("raw line break in a string", b'{"model":"a\nb"}'),
    Case("half a surrogate in the model", b'{"model":"\\ud800"}'),
    Case("open brackets", chat(messages="[" * 100_000)),
    Case("deep brackets", chat(messages="[" * 100_000 + "]" * 100_000)),
    Case("deep objects", chat(x='{"a":' * 100_000 + "1" + "}" * 100_000)),
    Case("gzip", b"\x1f\x8b\x08\x00" + b"\x00" * 20),
]
WRONG = [
    wrong("array", None, b"[]"),
    wrong("string", None, b'"m"'),
    wrong("null", None, b"null"),
    wrong("number", None, b"5"),
    wrong("no model", "model", chat(model="")),
    wrong("model null", "model", chat(model="null")),
    wrong("model number", "model", chat(model="5")),
    wrong("model list", "model", chat(model='["m"]')),
    wrong("model empty", "model", chat(model='""')),
    wrong("model too long", "model", chat(model=json.dumps("m" * 513))),
    wrong("no messages", "messages", chat(messages=""), "missing_required_parameter"),
    wrong("messages null", "messages", chat(messages="null"), "missing_required_parameter"),
    wrong("messages empty", "messages", chat(messages="[ ]")),
    wrong("messages string", "messages", chat(messages='"hi"')),
    wrong("messages object", "messages", chat(messages="{}")),
    wrong("stream string", "stream", chat(stream='"yes"')),
    wrong("stream number", "stream", chat(stream="1")),
    wrong("max_tokens negative", "max_tokens", chat(max_tokens="-1")),
    wrong("max_tokens text", "max_tokens", chat(max_tokens='"5"')),
    wrong("max_tokens float", "max_tokens", chat(max_tokens="1.5")),
    wrong("max_tokens list", "max_tokens", chat(max_tokens="[1]")),
    wrong("max_tokens huge float", "max_tokens", chat(max_tokens="1e400")),
    wrong("max_completion_tokens", "max_completion_tokens", chat(max_completion_tokens="-5")),
    wrong("service_tier", "service_tier", chat(service_tier="7")),
    wrong("duplicate model, last is wrong", "model", b'{"model":"m","model":5,"messages":[1]}'),
    Case("no prompt", chat(), 400, "missing_required_parameter", "prompt", "/v1/completions"),
    Case("unknown model", chat(model='"gpt-9"'), 404, "model_not_found", "model"),
    Case("model of odd letters", chat(model='"\\u0000\\n\u2028"'), 404, "model_not_found", "model"),
    Case("no model elsewhere", b"{}", 400, "invalid_value", "model", "/v1/embeddings"),
]


@pytest.mark.parametrize("case", [*BROKEN, *WRONG], ids=lambda case: case.name)
async def test_body_that_is_wrong(router: LoopbackRouter, engine: FakeOpenAI, case: Case) -> None:
    async with RawClient(router.url) as client:
        client.post(case.path, case.body)
        error = assert_refused(await client.answer(), case.status, case.code)
        assert error["param"] == case.param
        client.post(CHAT, GOOD)  # the connection lives too
        assert (await client.answer()).status == 200
    assert len([r for r in engine.requests if r.method == "POST"]) == 1


ODD_BUT_GOOD = [
    chat(max_tokens="99999999999999999999999999999999"),
    chat(max_tokens="0", stream="null", service_tier="null", logprobs="null", echo="null"),
    b'{"model":"x","model":"m","messages":[1],"messages":%b}' % MESSAGES.encode(),
    b' \n\t{"messages":%b , "model":"m"}\r\n ' % MESSAGES.encode(),
    b'{"messages":%b,"\\u006dodel":"m","user":"\xf0\x9f\xa6\x99"}' % MESSAGES.encode(),
    chat(messages='[{"role":"user","content":"' + "a" * (LIMIT_BYTES - 200) + '"}]'),
]


@pytest.mark.parametrize("body", ODD_BUT_GOOD, ids=range(len(ODD_BUT_GOOD)))
async def test_body_that_is_odd_goes_through_unchanged(
    router: LoopbackRouter, engine: FakeOpenAI, body: bytes
) -> None:
    engine.enqueue(Script(chunks=1))
    async with RawClient(router.url) as client:
        client.post(CHAT, body)
        await client.answer()  # which may be the engine's own refusal
    assert engine.requests[-1].body == body


# --- HTTP that is wrong ---------------------------------------------------------------------------

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "multipart/mixed; boundary=x", "application/x-www-form-urlencoded", "\xe9"],
)
async def test_content_type_that_is_not_json(router: LoopbackRouter, kind: str) -> None:
    async with RawClient(router.url) as client:
        line = f"content-type: {kind}\r\ncontent-length: {len(GOOD)}\r\n\r\n".encode("latin-1")
        client.send(HEAD + line + GOOD)
        error = assert_refused(await client.answer(), 415)
        assert "send application/json" in error["message"]


@pytest.mark.parametrize("line", [b"", b"content-type: Application/JSON; charset=utf-8\r\n"])
async def test_content_type_missing_or_in_capitals_is_fine(
    router: LoopbackRouter, line: bytes
) -> None:
    async with RawClient(router.url) as client:
        client.send(HEAD + line + b"content-length: %d\r\n\r\n" % len(GOOD) + GOOD)
        assert (await client.answer()).status == 200


async def test_body_over_the_limit_is_refused_before_it_is_read(router: LoopbackRouter) -> None:
    async with RawClient(router.url) as client:
        length = b"content-length: %d\r\nexpect: 100-continue\r\n\r\n" % (LIMIT_BYTES + 1)
        client.send(HEAD + length)
        error = assert_refused(await client.answer(), 413)
        assert str(LIMIT_BYTES) in error["message"]


async def test_chunked_body_over_the_limit(router: LoopbackRouter) -> None:
    piece = b"x" * 65_536
    async with RawClient(router.url) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(LIMIT_BYTES // len(piece) + 1):
            client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
        assert_refused(await client.answer(), 413)


async def test_chunked_body_within_the_limit(router: LoopbackRouter, engine: FakeOpenAI) -> None:
    async with RawClient(router.url) as client:
        client.send(HEAD + b"transfer-encoding: chunked\r\n\r\n")
        for byte in GOOD:
            client.send(b"1\r\n%c\r\n" % byte)
        client.send(b"0\r\n\r\n")
        assert (await client.answer()).status == 200
    assert engine.requests[-1].body == GOOD


@pytest.mark.parametrize("flood", [b"x-flood: " + b"a" * 400_000, b"x-f: a\r\n" * 50_000])
async def test_head_that_is_too_large(router: LoopbackRouter, flood: bytes) -> None:
    async with RawClient(router.url) as client:
        client.send(HEAD + flood)
        assert_refused(await client.answer(), 431, "head_too_large")
        assert await client.end() == b""


async def test_large_bodies_on_one_connection_are_no_large_heads(router: LoopbackRouter) -> None:
    body = chat(messages='[{"role":"user","content":"' + "a" * 300_000 + '"}]')
    async with RawClient(router.url) as client:
        for _ in range(3):
            client.post(CHAT, body)
            assert (await client.answer()).status == 200


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"],
    ids=["TLS", "a word", "HTTP/9.9"],
)
async def test_what_is_no_http(router: LoopbackRouter, data: bytes) -> None:
    async with RawClient(router.url) as client:
        client.send(data)
        assert_refused(await client.answer(), 400, "invalid_http")


@pytest.mark.parametrize(
    "method,path,status",
    [
        ("GET", "/nowhere", 404),
        ("POST", "/nowhere", 404),
        ("GET", "/", 404),
        ("GET", CHAT, 405),
        ("PUT", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("DELETE", "/admin/workers", 405),
        ("GET", "/v1/models/none", 404),
        ("GET", "/admin/requests/none", 404),
        ("PATCH", "/admin/workers/none", 404),
        ("DELETE", "/admin/workers/none", 404),
    ],
)
async def test_route_or_method_that_is_not_there(
    router: LoopbackRouter, method: str, path: str, status: int
) -> None:
    answer = await router.client.request(method, path, json={})
    assert answer.status_code == status
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    if status == 405:
        assert answer.headers["allow"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"url":"http://x","extra":1}', b"[" * 100_000, b"\xff"]
)
async def test_admin_body_that_is_wrong(router: LoopbackRouter, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = await router.client.post("/admin/workers", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_admin_body_is_bounded(router: LoopbackRouter) -> None:
    answer = await router.client.post("/admin/workers", content=b" " * (3 << 20))
    assert answer.status_code in (400, 413)
    assert answer.json()["error"]["message"]
