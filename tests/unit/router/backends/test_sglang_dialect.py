"""The SGLang dialect against answers made by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import pytest

from router.backends.base import BackendCall, EngineRefused, PrefillDone, Target
from router.backends.sglang import SglangBackend
from router.errors import UpstreamError
from router.origin import Origin, parse_origin
from router.upstream import PoolState, UpstreamResponse
from router.usage import TokenCounts
from router.wire import Deadlines, Headers
from splitserve.messages import Failure, Handoff, Role

ARGS: dict[str, object] = {
    "disaggregation_mode": "prefill",
    "model_path": "org/m",
    "served_model_name": "m",
    "version": "0.5.23",
    "disaggregation_bootstrap_port": 9001,
    "disaggregation_transfer_backend": "mooncake_tcp",
    "page_size": 1,
    "kv_cache_dtype": "auto",
    "context_length": 4096,
    "max_running_requests": 8,
    "max_total_num_tokens": 1000,
}
EVENTS: Headers = ((b"content-type", b"text/event-stream"),)
PLAIN: Headers = ((b"content-type", b"application/json"),)
CALL = BackendCall(b"/v1/chat/completions", b'{"model":"m","x":1.0}', PLAIN, "id")
COUNTS = TokenCounts(5, 0, 2, exact=True)


@dataclass
class Reply:
    """One answer, in one piece."""

    status: int
    body: bytes
    headers: Headers = PLAIN
    left: bool = True

    @property
    def at_end(self) -> bool:
        return not self.left

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self.left:
            raise StopAsyncIteration
        self.left = False
        return self.body

    async def read(self, limit_bytes: int) -> bytes:
        return b"".join([piece async for piece in self])

    def close(self) -> None:
        self.left = False

    def on_close(self, callback: Callable[[], None]) -> None:
        raise AssertionError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


@dataclass
class Server:
    """A client that is the server too: what each path answers, and what was sent there."""

    replies: dict[bytes, Reply] = field(default_factory=dict)
    sent: list[tuple[bytes, dict[str, object]]] = field(default_factory=list)

    async def request(
        self,
        origin: Origin,
        method: bytes,
        path: bytes,
        *,
        headers: Headers = (),
        body: bytes = b"",
        deadlines: Deadlines | None = None,
    ) -> UpstreamResponse:
        if method == b"POST":
            self.sent.append((path, json.loads(body)))
        reply = self.replies.get(path, Reply(404, b"{}"))
        return Reply(reply.status, reply.body, reply.headers)

    def pool(self, origin: Origin) -> PoolState:
        raise AssertionError

    def forget(self, origin: Origin) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError

    def says(self, **args: object) -> None:
        self.replies[b"/server_info"] = Reply(200, json.dumps({**ARGS, **args}).encode())
        self.replies[b"/generate"] = Reply(200, b"{}")


@pytest.fixture
def server() -> Server:
    server = Server()
    server.says()
    return server


def backend(server: Server, url: str = "http://10.0.0.7:30000") -> SglangBackend:
    return SglangBackend(Target("w", parse_origin(url), Role.AUTO), server, Deadlines())


async def meeting_of(server: Server, url: str) -> tuple[Handoff, dict[str, object]]:
    made = backend(server, url)
    await made.probe()
    handoff = await anext(made.prefill(CALL))
    assert isinstance(handoff, Handoff)
    return handoff, json.loads(handoff.attributes)


async def test_the_hand_off_names_the_prefill_servers_bootstrap(server: Server) -> None:
    handoff, meeting = await meeting_of(server, "http://10.0.0.7:30000")
    assert (handoff.worker_id, handoff.connector) == ("w", "sglang-mooncake_tcp")
    assert (meeting["bootstrap_host"], meeting["bootstrap_port"]) == ("10.0.0.7", 9001)
    assert handoff.handoff_id == str(meeting["bootstrap_room"])


async def test_an_ipv6_host_is_in_brackets(server: Server) -> None:
    _, meeting = await meeting_of(server, "http://[fd00::7]:30000")
    assert meeting["bootstrap_host"] == "[fd00::7]"


async def test_nothing_is_sent_before_the_hand_off_is_out(server: Server) -> None:
    made = backend(server)
    await made.probe()
    server.sent.clear()
    progress = made.prefill(CALL)
    await anext(progress)
    assert server.sent == []
    await progress.aclose()


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, b'{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}'),
        Reply(
            200,
            b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
            b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":'
            b'{"cached_tokens":0}}}\n\ndata: [DONE]\n\n',
            EVENTS,
        ),
    ],
    ids=["plain", "stream"],
)
async def test_the_account_of_a_prefill(server: Server, reply: Reply) -> None:
    made = backend(server)
    await made.probe()
    server.replies[CALL.path] = reply
    handoff, done = [news async for news in made.prefill(CALL)]
    assert isinstance(handoff, Handoff)
    assert isinstance(done, PrefillDone)
    assert (done.prompt_tokens, done.cached_tokens) == (9, 0)
    assert done.prefill_s > 0
    path, sent = server.sent[-1]
    assert path == CALL.path
    assert sent == {"model": "m", "x": 1.0, **json.loads(handoff.attributes)}


@pytest.mark.parametrize(
    "reply, status",
    [
        (Reply(400, b'{"message":"too long"}'), 400),
        (Reply(500, b"{}"), 500),
        (Reply(200, b'data: {"error":{"message":"Prefill transfer failed"}}\n\n', EVENTS), 500),
        (
            Reply(
                200,
                b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
                b'data: {"error":{"message":"m","code":503}}\n\ndata: [DONE]\n\n',
                EVENTS,
            ),
            503,
        ),
    ],
)
async def test_a_prefill_that_fails(server: Server, reply: Reply, status: int) -> None:
    made = backend(server)
    await made.probe()
    server.replies[CALL.path] = reply
    with pytest.raises(EngineRefused) as caught:
        _ = [news async for news in made.prefill(CALL)]
    assert caught.value.status == status


@pytest.mark.parametrize("mode, handed", [("prefill", True), ("prefill", False), ("decode", False)])
async def test_a_side_does_nothing_but_its_part(server: Server, mode: str, handed: bool) -> None:
    """An operator may change roles; the mode of a server is changed by starting it anew."""
    server.says(disaggregation_mode=mode)
    made = backend(server)
    await made.probe()
    sent = len(server.sent)
    handoff = Handoff("1", "p", "sglang-nixl", '{"bootstrap_room":1}') if handed else None
    with pytest.raises(UpstreamError, match=f"--disaggregation-mode {mode}; give it back the role"):
        await made.decode(CALL, handoff)
    assert len(server.sent) == sent


@pytest.mark.parametrize(
    "status, body, failure",
    [
        (400, b'{"message":"Prefill transfer failed"}', None),
        (500, b'{"message":"Decode transfer failed for request rank=0"}', Failure.HANDOFF),
        (500, b'{"message":"Prefill bootstrap failed for request"}', Failure.HANDOFF),
        (500, b'{"message":"Decode handshake failed for request"}', Failure.HANDOFF),
        (500, b'{"error":{"message":"x KVTransferError(bootstrap_room=1)"}}', Failure.HANDOFF),
        (503, b'{"message":"The request queue is full."}', Failure.REFUSED),
        (429, b"", Failure.REFUSED),
    ],
)
def test_errors(server: Server, status: int, body: bytes, failure: Failure | None) -> None:
    assert backend(server).failure_of(status, body) is failure


async def test_what_is_handed_over_is_not_computed_again(server: Server) -> None:
    made = backend(server)
    handoff = Handoff("1", "w", "sglang-nixl", "{}")
    assert made.recomputed(handoff, COUNTS) == 0
    await made.release(handoff, consumed=False)
    assert server.sent == []


async def test_a_pairing_key_is_made_of_words(server: Server) -> None:
    server.says(model_path="/models/a;b=c", page_size=None, version=None)
    snapshot = await backend(server).probe()
    fields = dict(part.split("=") for part in snapshot.pairing_key.split(";"))
    assert fields["model"] == "/models/a,b:c"
    assert (fields["page"], fields["version"]) == ("default", "default")


async def test_an_older_server(server: Server) -> None:
    server.replies[b"/get_server_info"] = server.replies.pop(b"/server_info")
    assert (await backend(server).probe()).role is Role.PREFILL


@pytest.mark.parametrize(
    "reply, why",
    [
        (Reply(401, b"{}"), "answered 401"),
        (Reply(200, b"<html>"), "GET /server_info: "),
        (Reply(200, b'{"model_path":"m"}'), "disaggregation_mode"),
        (Reply(200, json.dumps({**ARGS, "disaggregation_mode": "both"}).encode()), "'both'"),
    ],
)
async def test_what_is_not_this_engine(server: Server, reply: Reply, why: str) -> None:
    server.replies[b"/server_info"] = reply
    with pytest.raises(ValueError, match=why):
        await backend(server).probe()


async def test_metrics_that_are_odd(server: Server) -> None:
    made = backend(server)
    known = await made.probe()
    text = b'sglang:token_usage{dp_rank="0"} 7.5\nsglang:num_running_reqs NaN\n'
    server.replies[b"/metrics"] = Reply(200, text)
    load = await made.load(known)
    assert (load.running, load.waiting, load.kv_used_tokens) == (0, 0, 1000)
