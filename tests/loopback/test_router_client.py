"""The client behind `demo` and `explain`, against servers on real sockets."""

import asyncio
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from router.cli.commands import run
from router.cli.errors import CommandFailed
from router.cli.router_client import RouterClient, StreamedAnswer
from router.testing.fake_openai import FakeOpenAI
from router.testing.script import Script

RECORD = {"request_id": "r", "chosen": None, "actual": {"finish": "done", "output_tokens": 2}}


async def ask(url: str, max_tokens: int = 5) -> tuple[StreamedAnswer, list[str]]:
    """Ask from a thread, and return the answer and the pieces as they were shown."""
    shown: list[str] = []

    def talk() -> StreamedAnswer:
        with RouterClient(url) as client:
            return client.ask("m", "why?", max_tokens, shown.append)

    return await asyncio.to_thread(talk), shown


async def test_an_answer_is_shown_piece_by_piece(fake: FakeOpenAI) -> None:
    answer, shown = await ask(fake.url)
    assert shown == ["w0 ", "w1 ", "w2 ", "w3 ", "w4 "]
    assert answer.text == "".join(shown)
    assert answer.output_tokens == 5
    assert list(answer.token_times_s) == sorted(answer.token_times_s)
    assert answer.ttft_ms == pytest.approx(answer.token_times_s[0] * 1000)


async def test_the_pace_is_of_the_tokens_after_the_first(fake: FakeOpenAI) -> None:
    fake.set_script(Script(chunk_delay_s=0.02))
    answer, _ = await ask(fake.url, max_tokens=6)
    spent_s = answer.token_times_s[-1] - answer.token_times_s[0]
    assert spent_s >= 0.08
    assert answer.tokens_per_s == pytest.approx(5 / spent_s)


@pytest.mark.parametrize(
    "script,said",
    [
        (Script(status=503), "status 503: "),
        (Script(chunks=0), "the answer was empty; read the workers' logs"),
        (Script(cut="rst", cut_after_chunks=2), "start it with splitserve up"),
        (Script(merge={"error": {"message": "worker lost"}}), "the answer broke off: worker lost"),
    ],
)
async def test_a_failed_answer_is_one_line(fake: FakeOpenAI, script: Script, said: str) -> None:
    fake.set_script(script)
    with pytest.raises(CommandFailed) as caught:
        await ask(fake.url)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def admin() -> Iterator[str]:
    """A server with decision records: `r` is finished, `slow` finishes at the third look."""
    looks = iter(({}, {"finish": "running"}, {"finish": "done"}))

    class Records(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("authorization") not in (None, "Bearer secret"):
                self.reply(401, {"error": {"message": "no valid admin key"}})
            elif self.path == "/admin/requests/r":
                self.reply(200, RECORD)
            elif self.path == "/admin/requests/slow":
                self.reply(200, {**RECORD, "actual": next(looks)})
            else:
                self.reply(404, "nothing")

        def reply(self, status: int, body: object) -> None:
            self.send_response(status)
            self.end_headers()
            text = body if isinstance(body, str) else json.dumps(body)
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """A test that passes prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Records) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_record_is_fetched_again_until_it_is_finished(admin: str) -> None:
    def talk() -> dict[str, Any]:
        with RouterClient(admin) as client:
            return client.finished_decision("slow")

    record = await asyncio.to_thread(talk)
    assert record["actual"] == {"finish": "done"}


async def test_explain_prints_tables(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(run, ["explain", "r", "--url", admin]) == 0
    out = capsys.readouterr().out
    assert out.startswith("request r: ")
    assert "first token, TTFT" in out
    assert "Plans considered" in out


async def test_explain_json_is_the_record(admin: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(run, ["explain", "r", "--url", admin, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == RECORD


@pytest.mark.parametrize("key,status", [("secret", 0), ("wrong", 1)])
async def test_explain_sends_the_admin_key(
    admin: str,
    key: str,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MY_KEY", key)
    arguments = ["explain", "r", "--url", admin, "--key-env", "MY_KEY"]
    assert await asyncio.to_thread(run, arguments) == status
    if status:
        assert capsys.readouterr().err == f"error: {admin}: status 401: no valid admin key\n"


async def test_explain_of_an_unknown_request(
    admin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(run, ["explain", "x", "--url", admin]) == 1
    assert capsys.readouterr().err == f"error: {admin}: status 404: nothing\n"


def test_explain_without_a_router(capsys: pytest.CaptureFixture[str]) -> None:
    from workers.launch.ports import free_ports

    url = f"http://127.0.0.1:{free_ports(['127.0.0.1'])[0]}"
    assert run(["explain", "x", "--url", url]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"error: router {url}: ")
    assert "start it with splitserve up, or name it with --url" in said
