"""`splitserve probe` against fake servers on real sockets."""

import asyncio
import json
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from router.cli.commands import run
from router.settings import load
from router.testing.fake_native import FakeNative
from router.testing.fake_openai import FakeOpenAI
from router.testing.fake_vllm import FakeVllm
from router.testing.script import Script
from router.testing.vllm_kv import Fabric
from workers.launch.ports import free_ports

MAIN = (sys.executable, "-c", "from router.cli import main; main()")
DEADLINE_S = 60
SLOW_DECODE = Script(chunk_delay_s=0.002)
ERROR = Script(status=500)
Captured = pytest.CaptureFixture[str]


async def probe(*arguments: str) -> int:
    """Run the command beside the fakes, on an event loop of its own."""
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.to_thread(run, ["probe", *arguments])


def shown(capsys: Captured) -> dict[str, Any]:
    captured = capsys.readouterr()
    document: dict[str, Any] = json.loads(captured.out)
    return document


def errors(capsys: Captured) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert all(line.startswith("error: ") and "; " in line for line in lines)
    return [line.removeprefix("error: ") for line in lines]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def test_a_fleet_is_measured_and_paired(capsys: Captured) -> None:
    async with (
        FakeNative(script=SLOW_DECODE) as p,
        FakeNative(script=SLOW_DECODE) as d,
        FakeOpenAI(script=SLOW_DECODE, models=("m", "n")) as plain,
    ):
        assert await probe(f"{p.url},name=p", f"{d.url}/v1/,name=d", plain.url, "--json") == 0
    document = shown(capsys)
    first, second, third = document["workers"]
    assert (first["name"], first["url"]) == ("p", p.url)
    assert (first["engine"], first["version"], first["models"]) == ("native", "fake", ["m"])
    assert (first["context_tokens"], first["connector"]) == (4096, "native")
    assert second["url"] == d.url
    # two milliseconds a token at least, as it was told
    assert 0 < first["decode_tok_s"] <= 500
    assert first["prefill_tok_s"] > 0
    assert 0 < first["round_trip_ms"] < 1e3 * DEADLINE_S
    assert third["engine"] == "openai"
    assert third["why_no_handoff"] == "openai has no way to move KV"
    assert third["why_no_speeds"] == "it has 2 models; choose one with model=NAME"
    pairs = {(each["prefill"], each["decode"]): each["why_not"] for each in document["pairs"]}
    name = third["name"]
    assert pairs["p", "d"] is None
    assert pairs["d", "p"] is None
    assert pairs["p", name] == f"{name} (openai) has no way to move KV"
    assert (third["role"], document["failed"], document["written"]) == ("aggregated", [], None)
    prompts = [request.json() for request in p.calls("/v1/")]
    assert all(isinstance(body, dict) and body["max_tokens"] <= 16 for body in prompts)


async def test_no_speeds_sends_no_request_that_generates(capsys: Captured) -> None:
    async with FakeOpenAI() as fake:
        assert await probe(fake.url, "--no-speeds") == 0
        assert {request.method for request in fake.requests} == {"GET"}
    assert fake.url.removeprefix("http://") in capsys.readouterr().out


async def test_vllm_pairs_where_it_is_told_how_they_move_kv(capsys: Captured) -> None:
    fabric = Fabric()
    async with FakeVllm("nixl-pull", fabric) as p, FakeVllm("nixl-pull", fabric) as d:
        assert await probe(f"{p.url},kv=nixl-pull,name=p", f"{d.url},name=d", "--json") == 0
        first, second = (document := shown(capsys))["workers"]
        assert (first["engine"], first["connector"]) == ("vllm", "vllm-nixl-pull")
        assert first["version"]
        assert first["context_tokens"]
        assert (second["connector"], second["role"]) == (None, "aggregated")
        assert second["why_no_handoff"].startswith("no connector is known: add kv=nixl-pull")
        assert document["pairs"][0]["why_not"] == "d (vllm) has no way to move KV"
        told = (f"{each.url},kv=nixl-pull" for each in (p, d))
        assert await probe(*told, "--no-speeds", "--json") == 0
    document = shown(capsys)
    assert [each["can_hand_off"] for each in document["pairs"]] == [True, True]
    assert [each["role"] for each in document["workers"]] == ["auto", "auto"]


async def test_a_pair_that_does_not_fit_says_why(capsys: Captured) -> None:
    async with FakeNative() as p, FakeNative() as d:
        d.profile.pairing_key = "weights=other;layout=l;dtype=f32"
        assert await probe(f"{p.url},name=p", f"{d.url},name=d", "--no-speeds", "--json") == 0
    document = shown(capsys)
    assert [(each["prefill"], each["why_not"]) for each in document["pairs"]] == [
        ("p", "KV differs in weights (w / other)"),
        ("d", "KV differs in weights (other / w)"),
    ]
    assert [each["role"] for each in document["workers"]] == ["aggregated", "aggregated"]


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_ipv6_and_names(capsys: Captured) -> None:
    async with FakeOpenAI(host="::1") as six, FakeOpenAI(host="127.0.0.1") as four:
        port = httpx.URL(four.url).port
        assert await probe(six.url.removeprefix("http://"), f"localhost:{port}", "--json") == 0
    first, second = shown(capsys)["workers"]
    assert first["url"] == six.url
    assert first["url"].startswith("http://[::1]:")
    assert second["name"] == f"localhost:{port}"


@asynccontextmanager
async def secure(tmp_path: Path) -> AsyncIterator[tuple[FakeOpenAI, Path]]:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    trusted = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(trusted))
    async with FakeOpenAI(tls=context) as fake:
        yield fake, trusted


async def test_tls(tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    async with secure(tmp_path) as (fake, trusted):
        url = fake.url.replace("127.0.0.1", "localhost")
        assert await probe(url) == 1
        (line,) = errors(capsys)
        assert line.startswith(f"{url}: cannot connect (")
        assert "certificate verify failed" in line
        assert "let SSL_CERT_FILE name the certificate" in line
        assert await probe(url.replace("https", "http")) == 1
        assert "write https:// if it speaks TLS" in errors(capsys)[0]
        monkeypatch.setenv("SSL_CERT_FILE", str(trusted))
        assert await probe(url, "--json") == 0
        assert shown(capsys)["workers"][0]["url"] == url
    async with FakeOpenAI() as plain:
        assert await probe(plain.url.replace("http", "https")) == 1
    assert "write http:// if it speaks no TLS" in errors(capsys)[0]


async def test_keys(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RIGHT", "secret")
    monkeypatch.setenv("WRONG", "guess")
    async with FakeOpenAI(api_key="secret") as fake:
        assert await probe(fake.url) == 1
        mend = "name the environment variable that holds its key with --key-env NAME"
        assert errors(capsys) == [f"{fake.url}: it wants a key (401); {mend}"]
        assert await probe(fake.url, "--key-env", "WRONG") == 1
        assert errors(capsys) == [f"{fake.url}: it refuses the key that was sent (401); {mend}"]
        assert await probe(fake.url, "--key-env", "RIGHT", "--json") == 0
        assert shown(capsys)["workers"][0]["models"] == ["m"]
        assert await probe(f"{fake.url},key_env=RIGHT", "--no-speeds") == 0
        assert "secret" not in capsys.readouterr().out


async def test_what_fails_is_one_line_each_and_the_rest_is_shown(capsys: Captured) -> None:
    nobody = free_ports(["127.0.0.1"])[0]
    async with FakeOpenAI() as fake:
        status = await probe(
            f"127.0.0.1:{nobody}",
            "no-such-host.invalid:80",
            f"{fake.url}/chat",
            f"{fake.url},model=other,name=wrong",
            f"{fake.url.replace('127.0.0.1', 'localhost')},name=good",
            "--no-speeds",
        )
    assert status == 1
    captured = capsys.readouterr()
    assert [line.split()[0] for line in captured.out.splitlines()[:2]] == ["worker", "good"]
    refused, unknown, no_server, no_model = captured.err.splitlines()
    assert refused.startswith(f"error: http://127.0.0.1:{nobody}: cannot connect (")
    assert refused.endswith("; start the worker or correct its URL")
    assert unknown.startswith("error: http://no-such-host.invalid:80: cannot connect (")
    assert no_server.startswith(f"error: {fake.url}/chat: no LLM server answers there (GET /v1/mo")
    assert no_server.endswith("; check host, port and base path")
    assert no_model.startswith(f"error: {fake.url}: it serves m, not other; ")


async def test_failures_are_in_the_document_too(capsys: Captured) -> None:
    nobody = free_ports(["127.0.0.1"])[0]
    assert await probe(f"127.0.0.1:{nobody}", "--json") == 1
    captured = capsys.readouterr()
    (failed,) = json.loads(captured.out)["failed"]
    assert failed["url"] == f"http://127.0.0.1:{nobody}"
    assert captured.err == f"error: {failed['error']}\n"


async def test_a_server_that_cannot_be_measured_is_shown_with_the_reason(
    capsys: Captured,
) -> None:
    async with FakeOpenAI(queue=[ERROR] * 9) as fake:
        assert await probe(fake.url, "--json") == 0
    (worker,) = shown(capsys)["workers"]
    assert worker["why_no_speeds"].startswith("HTTP 500")
    assert (worker["prefill_tok_s"], worker["role"]) == (None, "aggregated")


async def test_nothing_is_written_over_or_by_half(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "splitserve.yaml"
    path.write_text("mine")
    nobody = free_ports(["127.0.0.1"])[0]
    assert await probe(f"127.0.0.1:{nobody}", "--write", str(path)) == 2
    assert errors(capsys) == [f"{path}: it is there already; name another file, or add --force"]
    assert await probe(f"127.0.0.1:{nobody}", "--write", str(path), "--force") == 1
    assert errors(capsys)[1] == f"{path} is not written; mend or leave out what failed"
    assert path.read_text() == "mine"
    async with FakeOpenAI() as fake:
        assert await probe(fake.url, "--write", str(path), "--force", "--no-speeds") == 0
    assert load(path).worker_specs[0].url == fake.url


async def test_what_is_written_can_be_checked_and_served(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "splitserve.yaml"
    port = free_ports(["127.0.0.1"])[0]
    # One decodes ten times slower, so the other way round would not pay.
    fast, slow = Script(chunk_delay_s=0.002), Script(chunk_delay_s=0.02)
    async with FakeNative(script=slow) as p, FakeNative(script=fast) as d:
        assert await probe(f"{p.url},name=p", f"{d.url},name=d", "--write", str(path)) == 0
        assert f"written: {path}; start with: splitserve route -c {path}" in capsys.readouterr().out
        assert run(["check", "-c", str(path)]) == 0
        assert capsys.readouterr().out == f"{path}: ok, 1 model, 2 workers\n"
        async with routed(path, port) as client:
            body = {"model": "m", "prompt": "hello", "max_tokens": 2}
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["choices"][0]["text"] == "w0 w1 "
            workers = (await client.get("/admin/workers")).json()["workers"]
    assert {worker["id"]: worker["state"] for worker in workers} == {"p": "ready", "d": "ready"}
    assert [spec.name for spec in load(path).worker_specs] == ["p", "d"]


@asynccontextmanager
async def routed(path: Path, port: int) -> AsyncIterator[httpx.AsyncClient]:
    """`splitserve route -c FILE`, ready."""
    process = await asyncio.create_subprocess_exec(
        *MAIN, "route", "-c", str(path), "--port", str(port),
        stderr=asyncio.subprocess.PIPE, env=dict(os.environ),
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert (await process.stderr.readline()).startswith(b"router on ")
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(base_url=url) as client:
            while not await is_ready(client):
                pass  # it asks over a socket each time
            yield client
    finally:
        process.terminate()
        await process.wait()


async def is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == 200
    except httpx.ConnectError:
        return False
