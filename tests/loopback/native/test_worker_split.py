"""Prefill on one worker, decode on another, over HTTP and the hand-off port: the same answer."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from workers.native.handoff.reference import HandoffReference
from workers.native.server.service import HANDOFF_HEADER
from workers.native.testing.served_worker import MODEL, ServedWorker
from workers.native.testing.waiting import thread_names, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Pair = tuple[ServedWorker, ServedWorker]


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "tcp"])
def pair(folder: Path, request: pytest.FixtureRequest) -> Iterator[Pair]:
    prefill = ServedWorker(folder, role="prefill", kv_tokens=2048, step_tokens=32)
    decode = ServedWorker(folder, role="decode", kv_tokens=2048, shared_memory=request.param)
    yield prefill, decode
    for worker in (prefill, decode):
        until(worker.idle, "all KV is free at the end")
        worker.stop()


@contextmanager
def prefilled(
    http: httpx.Client, worker: ServedWorker, path: str, body: dict[str, Any]
) -> Iterator[Iterator[Any]]:
    """The lines of a prefill call, as they come."""
    url = f"{worker.url}/splitserve/prefill{path}"
    with http.stream("POST", url, json=body) as reply:
        assert reply.status_code == 200
        yield (json.loads(line) for line in reply.iter_lines())


def decoded(
    http: httpx.Client, worker: ServedWorker, path: str, body: dict[str, Any], reference: str
) -> httpx.Response:
    headers = {HANDOFF_HEADER: reference}
    return http.post(f"{worker.url}{path}", json=body, headers=headers)


def split(http: httpx.Client, pair: Pair, path: str, body: dict[str, Any]) -> httpx.Response:
    prefill, decode = pair
    with prefilled(http, prefill, path, body) as lines:
        first = next(lines)
        answer = decoded(http, decode, path, body, first["attributes"])
        last = next(lines)
    assert last["prompt_tokens"] == first["prompt_tokens"]
    assert last["prefill_ms"] > 0
    return answer


def ask(text: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": text}]
    return CHAT, {"model": MODEL, "messages": messages, "seed": 7, "max_tokens": 12} | fields


def go_on(prompt: Any, **fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": MODEL, "prompt": prompt, "seed": 7, "max_tokens": 12} | fields


BODIES = {
    "greedy": ask("Where is the blue house?", temperature=0),
    "sampled": ask("Where is the blue house?", temperature=0.8),
    "three choices": ask("tell me three things", n=3, temperature=0.8),
    "three choices of whole blocks": go_on("x" * 48, n=3),
    "one token": go_on("a", temperature=0),
    "exactly one block": go_on("b" * 16, temperature=0.8),
    "one more than a block": go_on([65] * 17),
    "long": go_on("The tree and the sun. " * 10, temperature=0.8, max_tokens=20),
    "unicode": ask("\N{SNOWMAN} é \N{GRINNING FACE}" * 5, n=2),
    "one answer token": go_on("what follows is short", max_tokens=1),
    "penalties": ask("a a a a", presence_penalty=1.0, frequency_penalty=0.5, top_p=0.9, top_k=50),
    "logprobs": ask("logs", logprobs=True, top_logprobs=2),
    "stop": go_on("stop it", max_tokens=60, stop=["a", "e", "i", "o", "q"]),
}


def essence(answer: dict[str, Any]) -> Any:
    """What must not depend on where the prompt was computed."""
    text = [c["message"]["content"] if "message" in c else c["text"] for c in answer["choices"]]
    ends = [choice["finish_reason"] for choice in answer["choices"]]
    logs = [choice["logprobs"] for choice in answer["choices"]]
    numbers = [
        round(entry["logprob"], 3)
        for log in logs
        if log and "content" in log
        for entry in log["content"]
    ]
    return (
        text,
        ends,
        numbers,
        answer["usage"]["completion_tokens"],
        answer["usage"]["prompt_tokens"],
    )


@pytest.mark.parametrize("path,body", BODIES.values(), ids=BODIES)
def test_split_equals_whole(
    http: httpx.Client, pair: Pair, worker: ServedWorker, path: str, body: dict[str, Any]
) -> None:
    whole = http.post(f"{worker.url}{path}", json=body).json()
    for warm in (False, True):
        answer = split(http, pair, path, body)
        assert essence(answer.json()) == essence(whole)
        assert int(answer.headers["x-splitserve-transfer-bytes"]) > 0
        shared = pair[1].engine._allow_shared_memory
        assert answer.headers["x-splitserve-transfer-path"] == ("shared" if shared else "tcp")
        tokens = whole["usage"]["prompt_tokens"]
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert not warm or cached == tokens // 16 * 16


def events(raw: str) -> list[Any]:
    found = [line.removeprefix("data: ") for line in raw.splitlines() if line]
    assert found[-1] == "[DONE]"
    return [json.loads(each) for each in found[:-1]]


def test_a_split_stream(http: httpx.Client, pair: Pair, worker: ServedWorker) -> None:
    path, body = ask("stream me", n=2, stream=True, stream_options={"include_usage": True})
    whole = events(http.post(f"{worker.url}{path}", json=body).text)
    found = events(split(http, pair, path, body).text)

    def text(chunks: list[Any], index: int) -> str:
        mine = [
            c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index
        ]
        return "".join(choice["delta"].get("content", "") for choice in mine)

    for index in range(2):
        assert text(found, index) == text(whole, index)
    assert found[-1]["usage"]["completion_tokens"] == whole[-1]["usage"]["completion_tokens"]


def test_eight_at_once(http: httpx.Client, pair: Pair, worker: ServedWorker) -> None:
    jobs = [go_on(f"{number} times " * (1 + number * 2), seed=number, n=1 + number % 3)
            for number in range(8)]  # fmt: skip
    whole = [http.post(f"{worker.url}{p}", json=body).json() for p, body in jobs]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        found[number] = split(http, pair, *jobs[number]).json()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [essence(found[number]) for number in range(8)] == [essence(each) for each in whole]


def test_decode_asks_while_prefill_still_runs(
    http: httpx.Client, pair: Pair, worker: ServedWorker
) -> None:
    path, body = go_on("a prompt of several steps: " + "z" * 100)
    whole = http.post(f"{worker.url}{path}", json=body).json()
    prefill, decode = pair
    block, before = prefill.engine.pool.layout.block_bytes, prefill.worker.handoffs.sent_bytes
    prefill.gate.hold(after_steps=2)
    answers: list[httpx.Response] = []
    with prefilled(http, prefill, path, body) as lines:
        reference = next(lines)["attributes"]
        call = threading.Thread(
            target=lambda: answers.append(decoded(http, decode, path, body, reference))
        )
        call.start()
        prefill.gate.wait_held()
        # Two steps of 32 tokens make four blocks; the rest comes after the gate.
        until(lambda: prefill.worker.handoffs.sent_bytes - before == 4 * block, "blocks move")
        assert answers == []
        prefill.gate.release()
        assert next(lines)["prompt_tokens"] == 127
    call.join(20)
    assert essence(answers[0].json()) == essence(whole)


def assert_bad_gateway(answer: httpx.Response, code: str, text: str = "") -> None:
    assert answer.status_code == 502, answer.text
    error = answer.json()["error"]
    assert error["type"] == "server_error"
    assert error["code"] == code
    assert error["message"].startswith("hand-off failed: ")
    assert text in error["message"]


def word(value: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode()


DAMAGED = {
    "not base64": "%%%",
    "empty": "",
    "no json": base64.urlsafe_b64encode(b"{").decode(),
    "not utf-8": base64.urlsafe_b64encode(b'"\xff"').decode(),
    "an array": word([]),
    "a field missing": word({"offer_id": "x", "key": "k", "host": "h"}),
    "port is a word": word({"offer_id": "x", "key": "k", "host": "h", "port": "p"}),
    "port is endless": word({"offer_id": "x", "key": "k", "host": "h", "port": float("inf")}),
    "nested": base64.urlsafe_b64encode(b"[" * 20_000).decode(),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("header", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_header(
    http: httpx.Client, worker: ServedWorker, header: str, stream: bool
) -> None:
    path, body = ask("hi", stream=stream)
    answer = decoded(http, worker, path, body, header)
    assert_bad_gateway(answer, "handoff_refused", "the hand-off reference is damaged")


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_references_that_lead_nowhere(
    http: httpx.Client, pair: Pair, stream: bool, choices: int
) -> None:
    prefill, decode = pair
    path, body = ask("nowhere", stream=stream, n=choices)
    failures = decode.engine.stats().pull_failures
    with prefilled(http, prefill, path, body) as lines:
        good = HandoffReference.decode(next(lines)["attributes"])
        for changes, code in (
            ({"key": "0" * 32}, "handoff_refused"),
            ({"offer_id": "none"}, "handoff_refused"),
            ({"port": prefill.port}, "handoff_broken"),  # HTTP is spoken there
            ({"port": 1}, "handoff_broken"),
            ({"port": 70_000}, "handoff_broken"),
            ({"host": ""}, "handoff_broken"),
        ):
            wrong = replace(good, **changes).encode()
            answer = decoded(http, decode, path, body, wrong)
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] in (code, "handoff_corrupt")
        other = ask("somewhere else", stream=stream)[1]
        assert_bad_gateway(
            decoded(http, decode, path, other, good.encode()), "handoff_refused", "another prompt"
        )
        assert decoded(http, decode, path, body, good.encode()).status_code == 200
        again = decoded(http, decode, path, body, good.encode())
        assert_bad_gateway(again, "handoff_refused", "prefill again")
    until(decode.idle, "all KV is free")
    assert decode.engine.stats().pull_failures == failures + 8


def test_a_prefill_worker_that_stops_in_the_middle(
    http: httpx.Client, folder: Path, worker: ServedWorker
) -> None:
    path, body = go_on("this will not be finished " * 5)
    dying = ServedWorker(folder, step_tokens=32)
    dying.gate.hold(after_steps=1)
    answers: list[httpx.Response] = []
    with prefilled(http, dying, path, body) as lines:
        reference = next(lines)["attributes"]
        call = threading.Thread(
            target=lambda: answers.append(decoded(http, worker, path, body, reference))
        )
        call.start()
        dying.gate.wait_held()
        until(lambda: bool(thread_names("handoff-reader")), "it is being read")
        dying.worker.handoffs.stop()
        call.join(20)
        assert_bad_gateway(answers[0], "handoff_broken")
        dying.gate.release()
        assert "error" in next(lines)
    dying.stop()


def test_what_a_hand_off_does_not_carry(http: httpx.Client, worker: ServedWorker) -> None:
    reference = HandoffReference("i", "k", "127.0.0.1", 1).encode()
    for path, body in (go_on(["a", "b"]), go_on("a", echo=True, logprobs=1)):
        answer = decoded(http, worker, path, body, reference)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("host", ["[::1", "a b", "\xff"])
def test_a_strange_host_header(http: httpx.Client, worker: ServedWorker, host: str) -> None:
    path, body = go_on("hi")
    url = f"{worker.url}/splitserve/prefill{path}"
    answer = http.post(url, json=body, headers=[(b"host", host.encode("latin-1"))])
    assert answer.status_code in (200, 400)
    for offer_id in list(worker.engine.offers._offers):
        worker.engine.offers.release(offer_id)
