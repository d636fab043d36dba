"""What the engine says is what the client gets, whatever it is; compared with a direct call.

The engine here is scripted: it sends these bytes in place of an answer.
"""

from __future__ import annotations

import json

import httpx
import pytest

from router.testing.contract import CHAT, JSON, Served, chat
from router.wire import HOP_BY_HOP

EVENTS = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
PLAIN = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
DONE = "data: [DONE]\n\n"


def delta(fields: str) -> str:
    return f'data: {{"id":"1","choices":[{{"index":0,"delta":{{{fields}}}}}]}}\n\n'


HI = delta('"role":"assistant","content":"hi"')
STREAMS: dict[str, str] = {
    "comments": f"{EVENTS}: ping - 2026\n\n:\n\n{HI}: another\n{HI}{DONE}",
    "crlf": (HI + HI + DONE).replace("\n", "\r\n").join((EVENTS, "")),
    "data in several lines": f'{EVENTS}data: {{"choices":\ndata:  []}}\n\n{HI}{DONE}',
    "all fields of an event": f"{EVENTS}event: delta\nid: 7\nretry: 100\n{HI}{DONE}",
    "no space after data": f"{EVENTS}{HI.replace('data: ', 'data:')}data:[DONE]\n\n",
    "no end mark": f"{EVENTS}{HI}{HI}",
    "no last blank line": f"{EVENTS}{HI}data: [DONE]",
    "byte order mark": f"{EVENTS}\u00ef\u00bb\u00bf{HI}{DONE}",
    "tool calls": EVENTS
    + delta('"tool_calls":[{"index":0,"id":"c","function":{"name":"f","arguments":""}}]')
    + delta('"tool_calls":[{"index":0,"function":{"arguments":"{\\"a\\": 1.0"}}]')
    + DONE,
    "reasoning": EVENTS + delta('"reasoning_content":"hm"') + delta('"reasoning":"so"') + HI + DONE,
    "log probabilities": f"""{EVENTS}data: {{"choices":[{{"index":0,"delta":{{"content":"a"}},
data: "logprobs":{{"content":[{{"token":"a","logprob":-0.10,"bytes":[97]}}]}}}}]}}\n\n{DONE}""",
    "usage with more": f'{EVENTS}{HI}data: {{"choices":[],"usage":{{"completion_tokens":1,"x":{{}}'
    f"}}}}\n\n{DONE}",
    "numbers": EVENTS + delta('"content":"a","x":[1.0,1e400,-0.0,1E5]') + DONE,
    "unicode": EVENTS + HI.replace("hi", "世界 é\U0001f999".encode().decode("latin-1")) + DONE,
    "escapes": EVENTS + delta('"content":"\\u00e9\\ud83e\\udd99\\/"') + DONE,
    "error after tokens": f'{EVENTS}{HI}data: {{"error":{{"message":"no","code":500}}}}\n\n{DONE}',
    "what is no json": f"{EVENTS}data: hello\n\ndata: \n\n{DONE}",
    "chunks cut anywhere": "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    "transfer-encoding: chunked\r\n\r\n"
    + "".join(f"{len(piece):x}\r\n{piece}\r\n" for piece in (HI[:9], HI[9:30], HI[30:] + DONE))
    + "0\r\ntrailer: x\r\n\r\n",
}
ANSWERS: dict[str, str] = {
    "spacing and numbers": f'{PLAIN}\r\n{{ "id":"1" ,\n "choices":[], "x":[1.0, 1e400,-0.0] }}\n',
    "tool calls": f"""{PLAIN}\r\n{{"choices":[{{"message":{{"content":null,"reasoning_content":"r",
"tool_calls":[{{"id":"c","function":{{"name":"f","arguments":"{{\\"a\\":1}}"}}}}]}}}}]}}""",
    "unusual headers": f"{PLAIN}x-a: 1\r\nX-A: 2\r\nset-cookie: a=b\r\nset-cookie: c=d\r\n"
    'x-ratelimit-remaining: 0\r\netag: W/"1"\r\nopenai-processing-ms: 5\r\n\r\n{}',
    "odd content type": 'HTTP/1.1 200 OK\r\ncontent-type: Application/JSON; a="b"\r\n\r\n{}',
    "no content type": "HTTP/1.1 200 OK\r\n\r\nhello",
    "other good status": "HTTP/1.1 202 Accepted\r\ncontent-type: application/json\r\n\r\n{}",
    "bytes": "HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\n\r\n"
    + bytes(range(256)).decode("latin-1"),
    "content length": f"{PLAIN}content-length: 2\r\n\r\n{{}}",
    "nothing": f"{PLAIN}content-length: 0\r\n\r\n",
    "compressed": f"{PLAIN}content-encoding: gzip\r\n\r\n\x1f\x8bnot really",
    "refused": "HTTP/1.1 400 Bad\r\ncontent-type: application/json\r\n\r\n"
    '{"error":{"message":"no","type":"t","param":"p","code":"c","more":1.0}}',
    "refused without an envelope": "HTTP/1.1 422 Unprocessable\r\ncontent-type: application/json"
    '\r\n\r\n{"detail":[{"loc":["body"],"msg":"no"}]}',
    "refused in html": "HTTP/1.1 413 Too Large\r\ncontent-type: text/html\r\nx-a: 1\r\n\r\n<p>",
}


async def raw_answer(
    client: httpx.AsyncClient, url: str, content: bytes, script: dict[str, object]
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, the headers that are the engine's, and the body without any decoding."""
    headers = {**JSON, "x-fake": json.dumps(script)}
    async with client.stream("POST", url, content=content, headers=headers) as answer:
        body = b"".join([piece async for piece in answer.aiter_raw()])
    fields = [
        (name.decode().lower(), value.decode("latin-1"))
        for name, value in answer.headers.raw
        if name.lower() not in HOP_BY_HOP
    ]
    kept = [f for f in fields if not f[0].startswith("x-splitserve-")]
    return answer.status_code, [f for f in kept if f[0] not in ("x-request-id", "date")], body


async def assert_passed_on(served: Served, raw: str, *, stream: bool) -> None:
    content = json.dumps(chat(served, stream=stream)).encode()
    client = served.router.client
    routed = await raw_answer(client, CHAT, content, {"raw": raw})
    direct = await raw_answer(client, served.engine_url + CHAT, content, {"raw": raw})
    assert routed == direct


@pytest.mark.parametrize("name", STREAMS)
async def test_a_streams_bytes_come_back(served: Served, name: str) -> None:
    await assert_passed_on(served, STREAMS[name], stream=True)


@pytest.mark.parametrize("name", ANSWERS)
async def test_an_answers_bytes_come_back(served: Served, name: str) -> None:
    await assert_passed_on(served, ANSWERS[name], stream=False)


@pytest.mark.parametrize("split_bytes", [1, 7])
async def test_a_stream_in_crumbs_comes_back(served: Served, split_bytes: int) -> None:
    content = json.dumps(chat(served, stream=True, max_tokens=6)).encode()
    script: dict[str, object] = {"split_bytes": split_bytes, "merge": {"id": "é世"}}
    client = served.router.client
    routed = await raw_answer(client, CHAT, content, script)
    assert routed == await raw_answer(client, served.engine_url + CHAT, content, script)
    assert routed[2].endswith(DONE.encode())
