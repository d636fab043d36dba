"""Requests that are wrong: the right status in the OpenAI envelope, and the server lives on."""

import http.client
import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from workers.native.server.fields import _IGNORED, _REFUSED
from workers.native.testing.served_worker import MODEL, ServedWorker

CHAT, COMPLETIONS, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def connection(worker: ServedWorker) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", worker.port, timeout=20)
    yield connection
    connection.close()


def post(
    connection: http.client.HTTPConnection,
    path: str,
    body: bytes,
    headers: dict[str, str] | None = None,
) -> tuple[int, Any]:
    connection.request("POST", path, body, JSON if headers is None else headers)
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def assert_alive(connection: http.client.HTTPConnection) -> None:
    body = json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 2}).encode()
    status, answer = post(connection, CHAT, body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] in (1, 2)


def assert_refused(
    answer: tuple[int, Any], status: int, *, param: str | None = None, text: str = ""
) -> None:
    found, body = answer
    assert found == status, body
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert text in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 600


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": MESSAGES, "max_tokens": 4} | fields).encode()


def complete(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 4} | fields).encode()


def without(raw: bytes, name: str) -> bytes:
    fields = json.loads(raw)
    del fields[name]
    return json.dumps(fields).encode()


def with_raw(name: str, value: bytes) -> bytes:
    return chat()[:-1] + b', "%s": %s}' % (name.encode(), value)


DEEP = b'{"a":' * 20_000 + b"1" + b"}" * 20_000
# name: (path, body, param, part of the message)
BAD: dict[str, tuple[str, bytes, str | None, str]] = {
    "empty body": (CHAT, b"", None, "not valid JSON"),
    "broken json": (CHAT, chat()[:-1], None, "not valid JSON"),
    "two documents": (CHAT, chat() * 2, None, "not valid JSON"),
    "single quotes": (CHAT, b"{'model': 'm'}", None, "not valid JSON"),
    "not utf-8": (CHAT, chat().replace(b'"hi"', b'"\xff\xfe"'), None, "not valid JSON"),
    "utf-16": (CHAT, chat().decode().encode("utf-16"), None, "not valid JSON"),
    "lone surrogate": (CHAT, chat(user="\ud800"), None, "not valid JSON"),
    "lone surrogate in a prompt": (COMPLETIONS, complete(prompt="a\udc00"), None, "JSON"),
    "nested deeply": (CHAT, with_raw("metadata", DEEP), None, "not valid JSON"),
    "number of 5000 digits": (CHAT, with_raw("seed", b"1" * 5000), None, "not valid JSON"),
    "an array": (CHAT, b"[]", None, "should be an object"),
    "null": (CHAT, b"null", None, "should be an object"),
    "a string": (COMPLETIONS, b'"hi"', None, "should be an object"),
    "no model": (CHAT, without(chat(), "model"), "model", "required"),
    "model is null": (CHAT, chat(model=None), "model", "string"),
    "model is a number": (CHAT, chat(model=5), "model", "string"),
    "no messages": (CHAT, without(chat(), "messages"), "messages", "required"),
    "messages empty": (CHAT, chat(messages=[]), "messages", "at least 1"),
    "messages is a string": (CHAT, chat(messages="hi"), "messages", "array"),
    "a message is a string": (CHAT, chat(messages=["hi"]), "messages", "object"),
    "a message without role": (CHAT, chat(messages=[{"content": "x"}]), "messages", "role"),
    "role is a number": (CHAT, chat(messages=[{"role": 1, "content": ""}]), "messages", "role"),
    "no content": (CHAT, chat(messages=[{"role": "user"}]), "messages", "content"),
    "content is a number": (CHAT, chat(messages=[{"role": "user", "content": 1}]), "messages", ""),
    "a part is a string": (CHAT, chat(messages=[{"role": "u", "content": ["x"]}]), "messages", ""),
    "a part without text": (
        CHAT, chat(messages=[{"role": "u", "content": [{"type": "text"}]}]), "messages", "text",
    ),
    "an image": (
        CHAT, chat(messages=[{"role": "u", "content": [{"type": "image_url"}]}]),
        "messages[0].content[0].type=image_url", "not supported",
    ),
    "tool calls": (
        CHAT, chat(messages=[{"role": "a", "content": "", "tool_calls": [{}]}]),
        "messages[0].tool_calls", "not supported",
    ),
    "no prompt": (COMPLETIONS, without(complete(), "prompt"), "prompt", "required"),
    "prompt empty": (COMPLETIONS, complete(prompt=""), "prompt", "no tokens"),
    "prompts empty": (COMPLETIONS, complete(prompt=[]), "prompt", "empty"),
    "one of the prompts empty": (COMPLETIONS, complete(prompt=["a", ""]), "prompt", "no tokens"),
    "prompt of mixed types": (COMPLETIONS, complete(prompt=[1, "a"]), "prompt", ""),
    "prompt of booleans": (COMPLETIONS, complete(prompt=[True]), "prompt", ""),
    "prompt is an object": (COMPLETIONS, complete(prompt={"text": "a"}), "prompt", ""),
    "token too large": (COMPLETIONS, complete(prompt=[270]), "prompt", "not a token id"),
    "token negative": (COMPLETIONS, complete(prompt=[[1], [-1]]), "prompt", "not a token id"),
    "max_tokens negative": (CHAT, chat(max_tokens=-1), "max_tokens", "greater"),
    "max_tokens fractional": (CHAT, chat(max_tokens=1.5), "max_tokens", "integer"),
    "max_tokens huge": (COMPLETIONS, complete(max_tokens=1e300), "max_tokens", ""),
    "max_tokens a string": (CHAT, chat(max_tokens="4"), "max_tokens", "integer"),
    "max_tokens absurd": (COMPLETIONS, complete(max_tokens=10**18), "messages", "context length"),
    "n zero": (CHAT, chat(n=0), "n", "greater"),
    "n absurd": (CHAT, chat(n=10**6), "n", "less"),
    "temperature NaN": (CHAT, with_raw("temperature", b"NaN"), "temperature", "finite"),
    "temperature endless": (CHAT, with_raw("temperature", b"1e999"), "temperature", "finite"),
    "temperature negative": (CHAT, chat(temperature=-0.1), "temperature", "greater"),
    "temperature a boolean": (CHAT, chat(temperature=True), "temperature", "number"),
    "top_p zero": (CHAT, chat(top_p=0), "top_p", "greater"),
    "top_p over one": (CHAT, chat(top_p=1.01), "top_p", "less"),
    "top_k": (CHAT, chat(top_k=-2), "top_k", "greater"),
    "min_p": (CHAT, chat(min_p=2), "min_p", "less"),
    "penalty": (CHAT, chat(presence_penalty=2.1), "presence_penalty", "less"),
    "repetition penalty": (CHAT, chat(repetition_penalty=0), "repetition_penalty", "greater"),
    "seed too large": (CHAT, chat(seed=2**64), "seed", "less"),
    "seed a float": (CHAT, chat(seed=1.5), "seed", "integer"),
    "bias for no token": (CHAT, chat(logit_bias={"270": 1}), "logit_bias", "not a token id"),
    "bias for a word": (CHAT, chat(logit_bias={"cat": 1}), "logit_bias", "not a token id"),
    "bias of many digits": (CHAT, chat(logit_bias={"1" * 5000: 1}), "logit_bias", "token id"),
    "bias too large": (CHAT, chat(logit_bias={"1": 101}), "logit_bias", "less"),
    "bias NaN": (CHAT, with_raw("logit_bias", b'{"1": NaN}'), "logit_bias", ""),
    "bias is a list": (CHAT, chat(logit_bias=[1]), "logit_bias", "object"),
    "too many stops": (CHAT, chat(stop=["x"] * 17), "stop", ""),
    "stop is a number": (CHAT, chat(stop=5), "stop", ""),
    "stop token outside": (CHAT, chat(stop_token_ids=[270], min_tokens=2), "stop_token_ids", ""),
    "stop token negative": (CHAT, chat(stop_token_ids=[-1], min_tokens=2), "stop_token_ids", ""),
    "stream a string": (CHAT, chat(stream="yes"), "stream", "boolean"),
    "stream options": (CHAT, chat(stream_options=[]), "stream_options", ""),
    "logprobs a number": (CHAT, chat(logprobs=5), "logprobs", "boolean"),
    "too many top_logprobs": (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "less"),
    "logprobs a boolean": (COMPLETIONS, complete(logprobs=True), "logprobs", "integer"),
    "template takes over": (
        CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "messages",
    ),
    "template self": (CHAT, chat(chat_template_kwargs={"self": 1}), "chat_template_kwargs", "self"),
    "long unknown field": (CHAT, chat(**{"x" * 100_000: 1}), "x" * 100, "not a field"),
    "bias of a long key": (CHAT, chat(logit_bias={"x" * 100_000: "a"}), "logit_bias", "number"),
    "unknown field": (CHAT, chat(temprature=1), "temprature", "not a field"),
    "tokenize nothing": (TOKENIZE, b"{}", "prompt", "give 'prompt' or 'messages'"),
    "tokenize no messages": (TOKENIZE, b'{"messages": []}', "messages", "at least 1"),
    "tokenize a bad message": (TOKENIZE, b'{"messages": [{}]}', "messages", "role"),
    "tokenize a surrogate": (TOKENIZE, b'{"prompt": "\\ud800"}', None, "not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("path,body,param,text", BAD.values(), ids=BAD)
def test_bad_bodies(
    connection: http.client.HTTPConnection, path: str, body: bytes, param: str | None, text: str
) -> None:
    assert_refused(post(connection, path, body), 400, param=param, text=text)
    if path != TOKENIZE:  # the prefill routes read the same bodies
        prefill = f"/splitserve/prefill{path}"
        assert_refused(post(connection, prefill, body), 400, param=param, text=text)
    assert_alive(connection)


VALUES: dict[str, Any] = {"tool_choice": "required", "function_call": {"name": "f"}, "best_of": 2}


@pytest.mark.parametrize("name", sorted(_REFUSED))
def test_what_is_not_built_is_refused_by_name(
    connection: http.client.HTTPConnection, name: str
) -> None:
    for body in (
        chat(**{name: VALUES.get(name, "x")}),
        complete(**{name: VALUES.get(name, {"a": 1})}),
    ):
        answer = post(connection, CHAT if b"messages" in body else COMPLETIONS, body)
        assert_refused(answer, 400, param=name, text=f"'{name}' is not supported")
        assert answer[1]["error"]["code"] == "unsupported_parameter"
    for neutral in (None, *_REFUSED[name]):
        assert post(connection, CHAT, chat(**{name: neutral}))[0] == 200


def test_what_does_not_matter_is_taken(connection: http.client.HTTPConnection) -> None:
    assert post(connection, CHAT, chat(**dict.fromkeys(_IGNORED, "x")))[0] == 200
    extremes = {"top_k": 10**30, "min_tokens": 10**30, "seed": 2**64 - 1, "stop": ["x" * 10_000]}
    assert post(connection, CHAT, chat(**extremes, temperature=2, top_p=1e-300))[0] == 200
    assert post(connection, CHAT, chat(top_k=-1, temperature=1e-300, min_p=1))[0] == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_model(connection: http.client.HTTPConnection, path: str) -> None:
    for name in ("gpt-5", "", "x" * 100_000):
        body = chat(model=name) if path == CHAT else complete(model=name)
        answer = post(connection, path, body)
        assert_refused(answer, 404, param="model", text="does not exist")
        assert answer[1]["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "", "x" * 3000])
def test_wrong_content_type(connection: http.client.HTTPConnection, kind: str) -> None:
    answer = post(connection, CHAT, chat(), {"content-type": kind})
    assert_refused(answer, 415, text="send application/json")
    assert_alive(connection)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON", None])
def test_right_content_type(connection: http.client.HTTPConnection, kind: str | None) -> None:
    assert post(connection, CHAT, chat(), {"content-type": kind} if kind else {})[0] == 200


def test_wrong_path_and_method(connection: http.client.HTTPConnection) -> None:
    assert_refused(post(connection, "/v1/embeddings", chat()), 404, text="/v1/embeddings")
    connection.request("GET", CHAT)
    reply = connection.getresponse()
    assert_refused((reply.status, json.loads(reply.read())), 405, text=f"GET {CHAT}")
    assert_alive(connection)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit(worker: ServedWorker, chunked: bool) -> None:
    size = (16 << 20) + 1
    head = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    start = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{head}\r\n\r\n"
    body = b" " * size
    if chunked:
        body = f"{size:x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", worker.port), 20) as sock:
        sock.sendall(start.encode() + body)
        raw = b""
        while b"}}" not in raw and (more := sock.recv(65536)):
            raw += more
    head_line, _, rest = raw.partition(b"\r\n\r\n")
    assert b" 413 " in head_line.splitlines()[0]
    assert_refused((413, json.loads(rest)), 413, text="over 16 MiB")


def test_a_hand_off_for_what_it_cannot_carry(connection: http.client.HTTPConnection) -> None:
    two = complete(prompt=["a", "b"])
    answer = post(connection, f"/splitserve/prefill{COMPLETIONS}", two)
    assert_refused(answer, 400, param="prompt", text="several prompts")
    long = complete(prompt="x" * 300)
    answer = post(connection, f"/splitserve/prefill{COMPLETIONS}", long)
    assert_refused(answer, 400, param="messages", text="maximum context length")
    assert_alive(connection)
