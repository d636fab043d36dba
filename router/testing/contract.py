"""What the contract tests share: an engine behind a router, asked through it and directly.

A test takes the fixture `served`, sends the same bytes both ways with `both` and compares with
`assert_same`::

    async def test_chat(served: Served) -> None:
        routed, direct = await both(served, CHAT, chat(served))
        assert_same(served, routed, direct)

It then holds for the fakes of this package and for every real engine.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from router.testing.connection import RecordedRequest
from router.testing.loopback_router import LoopbackRouter

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True)
class Served:
    """An engine, and the router in front of it.

    `plan` is what a chat must be served by. `engine_url` answers the same requests without the
    router. `received` gives what the engine was sent last; None for one that does not tell.
    `added` names the fields that the dialect puts into a body; all others go as they are.
    `anew` are patterns of what the engine makes up for each answer, such as ids and clocks, and of
    what depends on the requests before, such as how much of a prompt it remembered.
    `recuts` says that it cuts the same text into other chunks of a stream at another time.
    """

    router: LoopbackRouter
    engine_url: str
    model: str
    plan: str
    received: Callable[[], RecordedRequest] | None = None
    added: frozenset[str] = frozenset()
    anew: tuple[re.Pattern[bytes], ...] = ()
    recuts: bool = False

    def without_new(self, body: bytes) -> bytes:
        """The body with a 0 for everything that the engine makes anew."""
        for pattern in self.anew:
            body = pattern.sub(b"0", body)
        return body


def chat(served: Served, **more: object) -> dict[str, object]:
    """A short chat, always answered the same way."""
    messages = [{"role": "user", "content": "Say something."}]
    known = {"model": served.model, "messages": messages, "max_tokens": 4, "temperature": 0}
    return {**known, **more}


def completion(served: Served, **more: object) -> dict[str, object]:
    """A short completion, always answered the same way."""
    known = {"model": served.model, "prompt": "Say something.", "max_tokens": 4, "temperature": 0}
    return {**known, **more}


async def both(
    served: Served,
    path: str,
    body: Mapping[str, object] | bytes,
    headers: Mapping[str, str] | None = None,
) -> tuple[httpx.Response, httpx.Response]:
    """The answer through the router, and the engine's own to the same bytes."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    client, sent = served.router.client, {**JSON, **(headers or {})}
    routed = await client.post(path, content=content, headers=sent)
    direct = await client.post(served.engine_url + path, content=content, headers=sent)
    return routed, direct


def assert_same(served: Served, routed: httpx.Response, direct: httpx.Response) -> None:
    """Raise AssertionError unless status, body and content type are the engine's own.

    Streams of an engine that recuts them are compared by what they add up to.
    """
    said = f"\nthrough the router: {routed.text}\ndirectly:           {direct.text}"
    assert routed.status_code == direct.status_code, said
    assert routed.headers["content-type"] == direct.headers["content-type"], said
    bodies = served.without_new(routed.content), served.without_new(direct.content)
    if served.recuts and is_stream(routed):
        assert added_up(bodies[0]) == added_up(bodies[1]), said
    else:
        assert bodies[0] == bodies[1], said


def is_stream(answer: httpx.Response) -> bool:
    """Whether an answer is a stream of events."""
    return answer.headers["content-type"].startswith("text/event-stream")


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with exactly one [DONE]."""
    assert is_stream(answer)
    return _events(answer.content)


def _events(stream: bytes) -> list[dict[str, Any]]:
    lines = [line for line in stream.decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def answers(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, or the one object of an answer that is none."""
    return events(answer) if is_stream(answer) else [answer.json()]


def added_up(stream: bytes) -> dict[str, Any]:
    """All chunks of a stream laid over each other: texts and lists joined, for each choice."""
    whole: dict[str, Any] = {}
    for chunk in _events(stream):
        by_index = {str(choice["index"]): choice for choice in chunk.get("choices", [])}
        whole = _joined("", whole, chunk | {"choices": by_index})
    return whole


def _joined(name: str, known: Any, more: Any) -> Any:
    """`more` added to `known`: both are values of the field `name`."""
    match known, more:
        case dict(), dict():
            added = {key: _joined(key, known.get(key), value) for key, value in more.items()}
            return known | added
        case list(), list():
            return known + more
        case str(), str() if name in ("content", "text"):
            return known + more
    return known if more is None else more
