"""A split answer is the whole answer, token for token, on the real model over real sockets.

Every case is asked four ways: whole and split on cold caches, then both again on warm ones (the
whole run then uses KV that came over the wire). Later all are asked again, eight at a time.
Greedy and seeded float32 answers have no reason to differ, so they must not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

MODEL = "smollm2-135m"
STORY = "Once upon a time, in a small town by the sea, there lived a clockmaker. "
Answer = tuple[Any, ...]


def cases() -> dict[str, dict[str, Any]]:
    """At least 40 bodies of completions: lengths, scripts, ends, seeds, choices."""
    prompts: dict[str, Any] = {
        "one-token": [504],
        "two-tokens": [504, 3575],
        "one-block": list(range(1000, 1016)),
        "block-and-one": list(range(1000, 1017)),
        "capital": "The capital of France is",
        "german": "Zähle auf: eins, zwei,",
        "japanese": "日本の首都は",
        "arabic": "عاصمة فرنسا هي",
        "emoji": "🙂🙃🙂🙃 means",
        "mixed": "naïve café — 10 € ≠ 10 $; Ω ≈ 3.14 \t tabs\nand lines",
        "code": "def fibonacci(n):\n    if n < 2:\n        return n\n",
        "numbers": "1, 1, 2, 3, 5, 8, 13,",
        "sql": "SELECT name, age FROM users WHERE",
        "list": "List three colours:\n1.",
        "spaces": "     leading and trailing     ",
        "200-words": STORY * 15,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, prompt in prompts.items():
        found[f"{name}-greedy"] = {"prompt": prompt, "temperature": 0, "max_tokens": 16}
        sampled = {"prompt": prompt, "temperature": 0.8, "seed": len(found), "max_tokens": 16}
        found[f"{name}-seeded"] = sampled
    greedy = {"temperature": 0, "max_tokens": 24}
    found |= {
        "4000-tokens": {"prompt": [1000 + i * 7919 % 30000 for i in range(4000)], **greedy},
        "stop-newline": {"prompt": prompts["list"], **greedy, "stop": ["\n"]},
        "stop-long": {"prompt": prompts["numbers"], **greedy, "stop": ["34, 55", "xyz"]},
        "stop-unicode": {"prompt": prompts["german"], **greedy, "stop": [" drei", "vier"]},
        "eos-first": {"prompt": prompts["capital"], **greedy, "logit_bias": {"2": 100}},
        "one-output": {"prompt": prompts["capital"], "temperature": 0, "max_tokens": 1},
        "two-outputs": {"prompt": prompts["capital"], "temperature": 0, "max_tokens": 2},
        "default-limit": {"prompt": prompts["capital"], "temperature": 0},
        "three-choices": {
            "prompt": prompts["200-words"], "n": 3, "temperature": 0.8, "seed": 7, "max_tokens": 12,
        },
        "top-p-k": {
            "prompt": prompts["code"], "temperature": 1.1, "top_p": 0.9, "top_k": 40, "seed": 3,
            "max_tokens": 16,
        },
        "penalties": {
            "prompt": prompts["sql"], "temperature": 0, "presence_penalty": 1.0,
            "frequency_penalty": 0.5, "repetition_penalty": 1.1, "max_tokens": 16,
        },
        "logprobs": {"prompt": prompts["capital"], **greedy, "logprobs": 3, "max_tokens": 6},
        "echo": {"prompt": prompts["emoji"], **greedy, "echo": True},
    }  # fmt: skip
    return found


CASES = cases()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """`splitserve up` with one prefill and one decode worker; yields its URL."""
    port = free_port()
    words = [sys.executable, "-m", "router", "up", "--model", MODEL, "--port", str(port)]
    child = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(url, child)
        yield url
    finally:
        child.send_signal(signal.SIGINT)
        try:
            assert child.wait(60) == 0, "up did not end well"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            raise


def wait_ready(url: str, child: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            try:
                child.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            pytest.fail(f"splitserve up ended with {child.returncode}")
    pytest.fail("the cluster did not get ready")


def ask(base: str, plan: str, body: dict[str, Any], salt: str) -> Answer:
    """Return what must be equal: texts, ends, log-probabilities' tokens, token counts."""
    request = urllib.request.Request(
        f"{base}/v1/completions",
        json.dumps({"model": MODEL, "cache_salt": salt, **body}).encode(),
        {"content-type": "application/json", "x-splitserve-plan": plan},
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            headers, answer = response.headers, json.loads(response.read())
    except urllib.error.HTTPError as error:
        pytest.fail(f"{plan}: {error.code} {error.read().decode()}")
    assert headers["x-splitserve-plan"] == plan
    parts = {part.partition("=")[0] for part in headers["x-splitserve-workers"].split(",")}
    assert parts == ({"prefill", "decode"} if plan == "disaggregated" else {"aggregated"})
    usage = answer["usage"]
    return (
        [choice["text"] for choice in answer["choices"]],
        [choice["finish_reason"] for choice in answer["choices"]],
        [(choice["logprobs"] or {}).get("tokens") for choice in answer["choices"]],
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


@pytest.fixture(scope="module")
def expected(base: str) -> dict[str, Answer]:
    """Every case, whole, each on a cold cache."""
    return {name: ask(base, "aggregated", body, f"whole-{name}") for name, body in CASES.items()}


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_split_equals_whole_cold_and_warm(
    base: str, expected: dict[str, Answer], name: str
) -> None:
    body, salt = CASES[name], f"split-{name}"
    assert ask(base, "disaggregated", body, salt) == expected[name], "split, cold"
    assert ask(base, "disaggregated", body, salt) == expected[name], "split, warm"
    assert ask(base, "aggregated", body, salt) == expected[name], "whole, on pulled KV"


def test_eos_first_is_an_empty_answer(expected: dict[str, Answer]) -> None:
    texts, ends, _, _, output_tokens = expected["eos-first"]
    assert (texts, ends, output_tokens) == ([""], ["stop"], 1)


def test_equal_under_eight_at_a_time(base: str, expected: dict[str, Answer]) -> None:
    plans = ("aggregated", "disaggregated")
    asked = [(name, plan) for name in CASES for plan in plans if name != "4000-tokens"]

    def run(which: tuple[str, str]) -> Answer:
        name, plan = which
        return ask(base, plan, CASES[name], f"crowd-{plan}-{name}")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(run, asked))
    wrong = [which for which, got in zip(asked, answers, strict=True) if got != expected[which[0]]]
    assert not wrong


def test_nothing_is_left_behind(base: str) -> None:
    with urllib.request.urlopen(f"{base}/admin/workers", timeout=10) as response:
        workers = json.loads(response.read())["workers"]
    assert [worker["in_flight"] for worker in workers] == [0, 0]
    for worker in workers:
        with urllib.request.urlopen(f"{worker['url']}/splitserve/load", timeout=10) as response:
            load = json.loads(response.read())
        assert (load["running"], load["waiting"], load["offers"]) == (0, 0, 0)
        assert load["kv_used_tokens"] == 0
