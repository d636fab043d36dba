"""The worker's OpenAI routes, as the official client sees them."""

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from workers.native.models.dense_kv import DenseKv
from workers.native.models.loading import load_decoder
from workers.native.testing.served_worker import MODEL, ServedWorker

ASK: list[Any] = [{"role": "user", "content": "Where is the cat?"}]
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def client(worker: ServedWorker) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, **wishes: Any) -> Any:
    more: dict[str, Any] = {"max_tokens": 12, "seed": 5} | wishes
    return client.chat.completions.create(model=MODEL, messages=ASK, **more)


def complete(client: openai.OpenAI, **wishes: Any) -> Any:
    more: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "seed": 5} | wishes
    return client.completions.create(model=MODEL, **more)


def test_models(client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-5")
    assert caught.value.code == "model_not_found"


def test_a_chat_says_what_the_model_says(
    client: openai.OpenAI, http: httpx.Client, worker: ServedWorker, folder: Any
) -> None:
    answer = chat(client, temperature=0, max_tokens=20)
    told = http.post(f"{worker.url}/tokenize", json={"messages": ASK}).json()
    ids = told["tokens"]
    assert told["count"] == len(ids) == answer.usage.prompt_tokens
    decoder = load_decoder(folder)
    kv, tokens, made = DenseKv(decoder.config, 256), list(ids), list[int]()
    while len(made) < 20:
        row = torch.tensor([len(tokens) - 1])
        at = torch.arange(kv.length_tokens, kv.length_tokens + len(tokens))
        logits = decoder.forward(torch.tensor(tokens), at, kv, row)
        kv.advance(len(tokens))
        tokens = [int(logits.argmax())]
        made += tokens
        if tokens[0] in decoder.config.eos_ids:
            break
    assert answer.choices[0].message.content == worker.worker.service.tokenizer.decode(made)
    assert answer.usage.completion_tokens == len(made)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.total_tokens == len(ids) + len(made)


def test_a_stream_is_the_same_answer(client: openai.OpenAI) -> None:
    whole = chat(client, n=3)
    chunks = list(chat(client, n=3, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    *body, last = chunks
    assert last.choices == []
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert all(chunk.usage is None for chunk in body)
    for index, choice in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in body if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert all(part.delta.role is None for part in mine[1:])
        assert "".join(part.delta.content or "" for part in mine) == choice.message.content
        assert [part.finish_reason for part in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == choice.finish_reason
    assert len({choice.message.content for choice in whole.choices}) > 1


def test_no_usage_where_none_is_asked(client: openai.OpenAI) -> None:
    for options in ({}, {"stream_options": {"include_usage": False}}):
        assert all(chunk.usage is None for chunk in chat(client, stream=True, **options))
    assert all(chunk.choices for chunk in complete(client, stream=True))


def test_the_bytes_of_a_stream(http: httpx.Client, worker: ServedWorker) -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 3, "stream": True}
    for wanted in (True, False):
        options = {"stream_options": {"include_usage": wanted}}
        answer = http.post(f"{worker.url}/v1/chat/completions", json=body | options)
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert float(answer.headers["x-splitserve-prefill-ms"]) > 0
        *events, done, rest = answer.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        parsed = [json.loads(event.removeprefix("data: ")) for event in events]
        assert all(("usage" in chunk) == wanted for chunk in parsed)


def test_seeds(client: openai.OpenAI) -> None:
    texts = [chat(client, seed=seed).choices[0].message.content for seed in (1, 1, 2, -1, 2**63)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 4
    free = {chat(client, seed=None).choices[0].message.content for _ in range(3)}
    assert len(free) > 1


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limits_of_a_chat(client: openai.OpenAI, worker: ServedWorker, field: str) -> None:
    extra = {"ignore_eos": True}
    for limit in (1, 2):
        answer = chat(client, **{"max_tokens": None, field: limit}, extra_body=extra)
        assert answer.usage.completion_tokens == limit
        assert answer.choices[0].finish_reason == "length"
    for absent in ({"max_tokens": None}, {"max_tokens": openai.omit}):
        answer = chat(client, **absent, extra_body=extra)  # all that is left of the context
        assert answer.usage.total_tokens == worker.engine.settings.max_context_tokens == 256
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **{"max_tokens": None, field: 0})
    assert caught.value.param == field


def test_limits_of_a_completion(client: openai.OpenAI) -> None:
    extra = {"ignore_eos": True}
    assert complete(client, max_tokens=1, extra_body=extra).usage.completion_tokens == 1
    for absent in (None, openai.omit):
        answer = complete(client, max_tokens=absent, extra_body=extra)
        assert answer.usage.completion_tokens == 16
    with pytest.raises(openai.BadRequestError, match="only with 'echo'"):
        complete(client, max_tokens=0)
    alone = complete(client, max_tokens=0, echo=True, n=2)
    assert [choice.text for choice in alone.choices] == [PROMPT, PROMPT]
    assert [choice.finish_reason for choice in alone.choices] == ["length", "length"]
    assert alone.usage.completion_tokens == 0
    streamed = list(complete(client, max_tokens=0, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == PROMPT


def test_the_context_is_a_bound(client: openai.OpenAI) -> None:
    long = "x" * 300
    for ask in (
        lambda: complete(client, prompt=long),
        lambda: complete(client, max_tokens=253),
        lambda: client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": long}]
        ),
        lambda: chat(client, max_tokens=10**15),
        lambda: chat(client, max_tokens=10**15, stream=True),
    ):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256") as caught:
            ask()
        assert caught.value.code == "context_length_exceeded"
    fits = complete(client, prompt="x" * 255, max_tokens=1)
    assert fits.usage.total_tokens == 256


def test_stop_strings(client: openai.OpenAI) -> None:
    free = complete(client, temperature=0, max_tokens=30).choices[0].text
    for stop in (free[4:7], [free[10:12], "never", free[6:9]], free[:1]):
        every = [stop] if isinstance(stop, str) else stop
        cut = min(free.index(each) + len(each) for each in every if each in free)
        expected = free[: max(cut - len(e) for e in every if free[:cut].endswith(e))]
        whole = complete(client, temperature=0, max_tokens=30, stop=stop).choices[0]
        assert (whole.text, whole.finish_reason) == (expected, "stop")
        parts = list(complete(client, temperature=0, max_tokens=30, stop=stop, stream=True))
        assert "".join(part.choices[0].text for part in parts) == expected
        assert parts[-1].choices[0].finish_reason == "stop"
    unused = complete(client, temperature=0, max_tokens=30, stop=["", "never"])
    assert unused.choices[0].text == free


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    assert chat(client).choices[0].logprobs is None
    answer = chat(client, logprobs=True, top_logprobs=3, temperature=0)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the likeliest
        assert entry.token == entry.top_logprobs[0].token
        assert math.exp(entry.logprob) <= 1
        assert isinstance(entry.bytes, list)
    said = b"".join(bytes(entry.bytes) for entry in entries if entry.token != "<|end|>")
    assert said.decode(errors="replace") == answer.choices[0].message.content
    parts = list(chat(client, logprobs=True, top_logprobs=3, temperature=0, stream=True))
    streamed = [e for p in parts if p.choices[0].logprobs for e in p.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in entries]
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    with pytest.raises(openai.BadRequestError, match="needs 'logprobs'"):
        chat(client, top_logprobs=2)


def test_logprobs_and_echo_of_a_completion(client: openai.OpenAI) -> None:
    plain = complete(client, temperature=0, logprobs=2)
    echoed = complete(client, temperature=0, logprobs=2, echo=True)
    one, both = plain.choices[0], echoed.choices[0]
    assert both.text == PROMPT + one.text
    tokens = plain.usage.completion_tokens
    assert len(one.logprobs.tokens) == len(one.logprobs.token_logprobs) == tokens
    assert both.logprobs.tokens == [*PROMPT, *one.logprobs.tokens]
    assert both.logprobs.token_logprobs[0] is None
    assert both.logprobs.top_logprobs[0] is None
    assert all(value < 0 for value in both.logprobs.token_logprobs[1:])
    assert both.logprobs.token_logprobs[-tokens:] == pytest.approx(
        one.logprobs.token_logprobs, abs=1e-4
    )
    assert [len(top) for top in both.logprobs.top_logprobs[1:]] == [2] * (len(PROMPT) + tokens - 1)
    for token, offset in zip(both.logprobs.tokens, both.logprobs.text_offset, strict=True):
        assert both.text[offset : offset + len(token)] == token
    parts = list(complete(client, temperature=0, logprobs=2, echo=True, stream=True))
    assert [t for p in parts for t in p.choices[0].logprobs.tokens] == both.logprobs.tokens
    offsets = [o for p in parts for o in p.choices[0].logprobs.text_offset]
    assert offsets == both.logprobs.text_offset


def test_several_prompts_and_token_ids(client: openai.OpenAI, worker: ServedWorker) -> None:
    alone = [complete(client, prompt=text, n=2).choices for text in ("one", "two", "three")]
    together = complete(client, prompt=["one", "two", "three"], n=2)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [c.text for c in together.choices] == [c.text for each in alone for c in each]
    assert together.usage.prompt_tokens == len("onetwothree")
    ids = worker.worker.service.tokenizer.encode("one")
    for prompt in (ids, [ids]):
        assert complete(client, prompt=prompt, n=2).choices[0].text == alone[0][0].text


def test_the_prefix_cache_is_reported_and_changes_nothing(client: openai.OpenAI) -> None:
    prompt = "a prompt that nobody has sent before, of several blocks"
    cold, warm = (complete(client, prompt=prompt) for _ in range(2))
    assert cold.usage.prompt_tokens_details.cached_tokens == 0
    assert warm.usage.prompt_tokens_details.cached_tokens == 48
    assert cold.choices[0].text == warm.choices[0].text
    salted = complete(client, prompt=prompt, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_template_options(client: openai.OpenAI) -> None:
    normal = chat(client, temperature=0).usage.prompt_tokens
    for body in (
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"add_generation_prompt": False}},
    ):
        assert chat(client, temperature=0, extra_body=body).usage.prompt_tokens == normal - 1
    chat(client, extra_body={"chat_template_kwargs": {"tools": None, "anything": [1]}})


def test_state_routes(client: openai.OpenAI, http: httpx.Client, worker: ServedWorker) -> None:
    chat(client)
    assert http.get(f"{worker.url}/health").json() == {"status": "ok"}
    metrics = http.get(f"{worker.url}/metrics").text
    assert "splitserve_worker_output_tokens_total" in metrics
    assert 'splitserve_worker_finished_total{reason="length"}' in metrics
    profile = http.get(f"{worker.url}/splitserve/profile").json()
    assert profile["models"] == [MODEL]
    assert profile["max_context_tokens"] == 256
    assert http.get(f"{worker.url}/splitserve/load").json()["running"] == 0
    assert http.post(f"{worker.url}/splitserve/release/none").json() == {"released": False}
    assert http.post(f"{worker.url}/tokenize", json={"prompt": "abc"}).json()["count"] == 3
