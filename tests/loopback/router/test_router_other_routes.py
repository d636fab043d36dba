"""Whatever else is posted to /v1 with a model goes, unsplit and unchanged, to who has it."""

from __future__ import annotations

import httpx
import pytest

from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter, Split

ROUTES = (
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/audio/speech",
    "/v1/images/generations",
    "/v1/moderations",
    "/v1/a/route/of/tomorrow",
)
MARK = b"----WebKitFormBoundary7MA4YWxk"
FORM_KIND = f"multipart/form-data; boundary={MARK.decode()}"
AUDIO = bytes(range(256)) * 2000


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
    return b"--" + MARK + b"\r\n" + head + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + MARK + b"--\r\n"


SOUND = part("file", AUDIO, '; filename="a.wav"\r\nContent-Type: audio/wav')


@pytest.mark.parametrize("path", ROUTES)
async def test_a_route_goes_through_unsplit(path: str) -> None:
    told = {"object": "x", "data": [1.5, None], "usage": {"prompt_tokens": 2}}
    async with FakeOpenAI(routes={path: (200, told)}) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            body = b'{"input" : ["a","b"], "model":"m","encoding_format":"base64", "x":1.0}'
            headers = {"content-type": "application/json"}
            answer = await router.client.post(path, content=body, headers=headers)
            assert (answer.status_code, answer.json()) == (200, told)
            assert answer.headers["x-splitserve-plan"] == "aggregated"
            assert fake.requests[-1].path == path
            assert fake.requests[-1].body == body
            await router.idle()


async def test_an_input_counts_as_the_prompt(split: Split) -> None:
    body = {"model": "m", "input": "word " * 4000}
    answer = await split.router.client.post("/v1/embeddings", json=body)
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await split.router.record(answer)
    assert record["prompt_tokens"] == pytest.approx(5000, abs=5)
    await split.router.idle()


@pytest.mark.parametrize("model", ["m", "elsewhere"])
async def test_a_route_without_a_worker_for_its_model(model: str) -> None:
    async with FakeOpenAI() as fake:  # it has the model, and not the route
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            answer = await router.client.post("/v1/rerank", json={"model": model, "query": "q"})
            assert answer.status_code == 404
            code = answer.json()["error"]["code"]
            assert code == (None if model == "m" else "model_not_found")  # the engine's, or ours
            await router.idle()


async def test_a_form_goes_through_byte_for_byte() -> None:
    path, told = "/v1/audio/transcriptions", {"text": "hello"}
    async with FakeOpenAI(routes={path: (200, told)}) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            body = form(SOUND, part("model", b"m"), part("language", "dé".encode()))
            headers = {"content-type": FORM_KIND}
            answer = await router.client.post(path, content=body, headers=headers)
            assert (answer.status_code, answer.json()) == (200, told)
            assert fake.requests[-1].body == body
            assert fake.requests[-1].headers["content-type"] == FORM_KIND
            await router.idle()


async def test_an_sdks_upload_under_another_name() -> None:
    """As the openai package sends it; the engine knows the model by a longer name."""
    path = "/v1/audio/transcriptions"
    async with FakeOpenAI(models=("org/whisper",), routes={path: (200, {"text": "t"})}) as fake:
        worker = {"url": fake.url, "name": "w", "model": "m", "engine_model": "org/whisper"}
        async with LoopbackRouter(worker) as router:
            sent = httpx.Request("POST", router.url, files={"file": ("a.wav", AUDIO)})
            answer = await router.client.post(
                path, data={"model": "m", "stream": "false"}, files={"file": ("a.wav", AUDIO)}
            )
            assert answer.status_code == 200
            got = fake.requests[-1]
            assert b'name="model"\r\n\r\norg/whisper\r\n' in got.body
            assert AUDIO in got.body
            assert got.headers["content-type"].startswith("multipart/form-data; boundary=")
            assert int(got.headers["content-length"]) == len(got.body) > len(sent.read())
            await router.idle()


@pytest.mark.parametrize(
    "kind, body, wanted",
    [
        (FORM_KIND, form(SOUND), "the form needs a field 'model'"),
        (FORM_KIND, form(SOUND, part("model", b"")), "the form needs a field 'model'"),
        (FORM_KIND, form(part("model", b"x" * 513)), "at most 512 characters"),
        (FORM_KIND, form(part("model", b"\xff")), "the form is not valid"),
        (FORM_KIND, b'{"model":"m"}', "the form is not valid"),
        (FORM_KIND, part("model", b"m"), "the form is not valid"),
        ("multipart/form-data", form(part("model", b"m")), "names no boundary"),
    ],
)
async def test_a_form_that_is_wrong_is_explained(kind: str, body: bytes, wanted: str) -> None:
    async with FakeOpenAI() as fake:
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            headers = {"content-type": kind}
            path = "/v1/audio/transcriptions"
            answer = await router.client.post(path, content=body, headers=headers)
            assert answer.status_code == 400
            assert wanted in answer.json()["error"]["message"]
            assert [r for r in fake.requests if r.method == "POST"] == []
            await router.idle()


async def test_a_form_of_unknown_model_or_over_the_limit() -> None:
    async with FakeOpenAI() as fake:
        limits = {"max_body_bytes": 100_000}
        async with LoopbackRouter({"url": fake.url, "name": "w"}, limits=limits) as router:
            path, headers = "/v1/audio/translations", {"content-type": FORM_KIND}
            small, large = form(part("model", b"other")), form(SOUND, part("model", b"m"))
            answer = await router.client.post(path, content=small, headers=headers)
            assert answer.status_code == 404
            answer = await router.client.post(path, content=large, headers=headers)
            assert answer.status_code == 413
            await router.idle()


async def test_a_form_is_not_split(split: Split) -> None:
    headers = {"content-type": FORM_KIND}
    body = form(part("model", b"m"), part("prompt", b"a"))
    answer = await split.router.client.post("/v1/audio/speech", content=body, headers=headers)
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    assert split.prefill.calls("/splitserve/") == []
    await split.router.idle()
