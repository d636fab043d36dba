"""The worker's own failures, as a client sees them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from workers.native.testing.served_worker import MODEL, ServedWorker
from workers.native.testing.waiting import until


@pytest.fixture
def failing(folder: Path) -> Iterator[ServedWorker]:
    """A worker of its own: what fails here is logged as an error, and should be."""
    worker = ServedWorker(folder)
    yield worker
    worker.gate.release()
    until(worker.idle, "all KV is free at the end")
    worker.stop()


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", "max_tokens": 30, "ignore_eos": True} | fields


def test_a_step_fails_before_the_first_token(failing: ServedWorker, http: httpx.Client) -> None:
    for stream in (False, True):
        failing.gate.fail_next = True
        answer = http.post(f"{failing.url}/v1/completions", json=body(stream=stream))
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_stopped")
        assert "told to fail" in error["message"]
        assert answer.headers["retry-after"] == "1"
    assert http.post(f"{failing.url}/v1/completions", json=body()).status_code == 200
    assert http.get(f"{failing.url}/health").status_code == 200


def test_a_step_fails_in_the_middle_of_a_stream(failing: ServedWorker, http: httpx.Client) -> None:
    failing.gate.hold(after_steps=5)
    path = f"{failing.url}/v1/completions"
    with http.stream("POST", path, json=body(stream=True)) as answer:
        assert answer.status_code == 200
        failing.gate.wait_held()
        failing.gate.fail_next = True
        failing.gate.release()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert "[DONE]" not in lines
    *tokens, last = map(json.loads, lines)
    assert 0 < len(tokens) <= 5
    assert set(last) == {"error"}
    assert last["error"]["code"] == "engine_stopped"


def test_the_official_client_raises_its_own_error_in_a_stream(failing: ServedWorker) -> None:
    with openai.OpenAI(base_url=f"{failing.url}/v1", api_key="x", max_retries=0) as client:
        failing.gate.hold(after_steps=5)
        stream = client.completions.create(
            model=MODEL, prompt="hello", stream=True, max_tokens=30, seed=1
        )
        failing.gate.wait_held()
        failing.gate.fail_next = True
        failing.gate.release()
        with pytest.raises(openai.APIError, match="told to fail"):
            list(stream)


def test_a_failed_prefill_is_told_in_its_second_line(
    failing: ServedWorker, http: httpx.Client
) -> None:
    failing.gate.fail_next = True
    answer = http.post(f"{failing.url}/splitserve/prefill/v1/completions", json=body())
    first, second = (json.loads(line) for line in answer.text.splitlines())
    assert set(first) == {"handoff_id", "attributes", "prompt_tokens"}
    assert second["error"]["code"] == "engine_stopped"
    assert failing.engine.offers.live == 0


def test_more_than_can_wait(failing: ServedWorker, http: httpx.Client) -> None:
    limit = failing.engine.settings.max_waiting
    failing.gate.hold()
    with openai.OpenAI(base_url=f"{failing.url}/v1", api_key="x", max_retries=0) as client:
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt=["a"] * (limit + 2), max_tokens=1)
    assert caught.value.code == "engine_busy"
    assert caught.value.response.headers["retry-after"] == "1"
    failing.gate.release()
    until(failing.idle, "those that did wait are gone")
    assert http.post(f"{failing.url}/v1/completions", json=body()).status_code == 200


def test_a_stopped_engine(failing: ServedWorker, http: httpx.Client) -> None:
    failing.engine.stop()
    assert http.get(f"{failing.url}/health").status_code == 503
    for path in ("/v1/completions", "/splitserve/prefill/v1/completions"):
        answer = http.post(f"{failing.url}{path}", json=body())
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_stopped"
    assert http.get(f"{failing.url}/metrics").status_code == 200
