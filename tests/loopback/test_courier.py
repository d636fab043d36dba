"""Two couriers over real sockets: what arrives, what is refused, and that nothing is left."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from workers.courier.slot_head import tokens_digest
from workers.courier.testing.served_courier import ServedCourier
from workers.courier.testing.slot_files import slot_file

TOKENS = list(range(100, 140))
Json = dict[str, Any]


def name_of(word: str) -> str:
    return f"splitserve-{hashlib.md5(word.encode(), usedforsecurity=False).hexdigest()}.slot"


NAME = name_of("a")


def promise(content: bytes, tokens: list[int], name: str = NAME) -> Json:
    size_bytes, digest = len(content), tokens_digest(tokens)
    return {"name": name, "size_bytes": size_bytes, "tokens": len(tokens), "digest": digest}


def post(courier: ServedCourier, route: str, wish: Json, key: str = "", status: int = 200) -> Json:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # Plain HTTP: without the certificates, whose loading takes longer than the request.
    reply = httpx.post(
        f"{courier.url}{route}", json=wish, headers=headers, timeout=20, verify=False
    )
    assert reply.status_code == status, reply.text
    answer: Json = reply.json()
    return answer if status == 200 else answer["error"]


def sealed(courier: ServedCourier, tokens: list[int] = TOKENS, key: str = "") -> Json:
    """Save a file, seal it, and return what a pull of it says."""
    content = slot_file(tokens)
    (courier.folder / NAME).write_bytes(content)
    seal = post(courier, "/seal", promise(content, tokens), key)
    source = {"url": courier.url, "folder": seal["folder"], "ticket": seal["ticket"]}
    return {**promise(content, tokens), "checksum": seal["checksum"], "source": source}


@pytest.fixture
def p(tmp_path: Path) -> Iterator[ServedCourier]:
    with ServedCourier(tmp_path / "p") as courier:
        yield courier


@pytest.fixture
def d(tmp_path: Path) -> Iterator[ServedCourier]:
    with ServedCourier(tmp_path / "d") as courier:
        yield courier


def test_a_file_arrives_whole_and_under_its_name(p: ServedCourier, d: ServedCourier) -> None:
    moved = post(d, "/pull", sealed(p))
    assert (d.folder / NAME).read_bytes() == (p.folder / NAME).read_bytes() == slot_file(TOKENS)
    assert moved["size_bytes"] == len(slot_file(TOKENS))
    assert d.files() == [NAME]


def test_the_seal_tells_how_the_kv_lies(p: ServedCourier) -> None:
    content = slot_file(TOKENS)
    (p.folder / NAME).write_bytes(content)
    layout = post(p, "/seal", promise(content, TOKENS))["layout"]
    assert layout["kv"] == "f16/f16"
    assert layout["v_order"] == "rows"
    assert layout["streams"] == 1


def test_couriers_of_one_folder_copy_nothing(p: ServedCourier) -> None:
    with ServedCourier(p.folder) as other:
        wish = sealed(p)
        wish["source"]["url"] = "http://127.0.0.1:1"  # nobody there: it is not asked
        moved = post(other, "/pull", wish)
    assert moved["size_bytes"] == 0
    assert p.files() == [NAME]


def test_a_shared_file_is_checked_all_the_same(p: ServedCourier) -> None:
    wish = sealed(p)
    damaged = bytearray((p.folder / NAME).read_bytes())
    damaged[-3] ^= 1
    (p.folder / NAME).write_bytes(damaged)
    error = post(p, "/pull", wish, status=409)
    assert error["code"] == "bad_slot_file"


def cut(content: bytes) -> bytes:
    return content[:-1]


def halved(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


def longer(content: bytes) -> bytes:
    return content + bytes(64)


def swapped(content: bytes) -> bytes:
    other = slot_file([token + 1 for token in TOKENS])
    assert len(other) == len(content)
    return other


def junk(content: bytes) -> bytes:
    return b"\xff" * len(content)


def emptied(content: bytes) -> bytes:
    return b""


TAMPERING = [cut, halved, flipped, longer, swapped, junk, emptied]


@pytest.mark.parametrize("tamper", TAMPERING)
def test_a_file_changed_after_its_seal_does_not_arrive(
    p: ServedCourier, d: ServedCourier, tamper: Callable[[bytes], bytes]
) -> None:
    wish = sealed(p)
    path = p.folder / NAME
    path.write_bytes(tamper(path.read_bytes()))
    error = post(d, "/pull", wish, status=409)
    assert error["code"] == "bad_slot_file"
    assert d.files() == []


@pytest.mark.parametrize("tamper", [t for t in TAMPERING if t is not flipped])
def test_a_file_that_is_not_what_the_engine_saved_is_not_sealed(
    p: ServedCourier, tamper: Callable[[bytes], bytes]
) -> None:
    content = slot_file(TOKENS)
    (p.folder / NAME).write_bytes(tamper(content))
    error = post(p, "/seal", promise(content, TOKENS), status=409)
    assert error["code"] == "bad_slot_file"
    assert p.files() == []


@contextlib.contextmanager
def source_that_sends(content: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Another courier, or somebody between, who sends just this; and what it was shown."""
    shown: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            shown.append(f"{self.path} {self.headers['authorization']}")
            self.send_response(status)
            self.end_headers()
            with contextlib.suppress(OSError):  # a reader who has seen enough closes
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", shown
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("tamper", TAMPERING)
def test_a_file_changed_on_its_way_does_not_arrive(
    p: ServedCourier, d: ServedCourier, tamper: Callable[[bytes], bytes]
) -> None:
    wish = sealed(p)
    with source_that_sends(tamper(slot_file(TOKENS))) as (url, _):
        wish["source"]["url"] = url
        error = post(d, "/pull", wish, status=409)
    assert error["code"] == "bad_slot_file"
    assert d.files() == []


def test_a_source_is_shown_the_ticket_and_no_key(tmp_path: Path, p: ServedCourier) -> None:
    wish = sealed(p)
    with ServedCourier(tmp_path / "keyed", key="secret") as keyed:
        with source_that_sends(slot_file(TOKENS)) as (url, shown):
            wish["source"]["url"] = url
            post(keyed, "/pull", wish, "secret")
    assert shown == [f"/files/{NAME} Bearer {wish['source']['ticket']}"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_a_source_that_refuses(p: ServedCourier, d: ServedCourier, status: int) -> None:
    wish = sealed(p)
    with source_that_sends(b"no", status) as (url, _):
        wish["source"]["url"] = url
        error = post(d, "/pull", wish, status=502)
    assert error["code"] == "source_failed"
    assert d.files() == []


def test_a_source_that_is_not_there(p: ServedCourier, d: ServedCourier) -> None:
    wish = sealed(p)
    p.stop()
    error = post(d, "/pull", wish, status=502)
    assert error["code"] == "source_failed"
    assert p.url in error["message"]
    assert d.files() == []


def test_a_wrong_ticket_gets_nothing(p: ServedCourier, d: ServedCourier) -> None:
    wish = sealed(p)
    wish["source"]["ticket"] = "0" * 32
    error = post(d, "/pull", wish, status=502)
    assert "404" in error["message"]
    assert httpx.get(f"{p.url}/files/{NAME}").status_code == 404


def test_only_what_was_sealed_is_served(p: ServedCourier) -> None:
    (p.folder / NAME).write_bytes(b"x")
    (p.folder / "other").write_bytes(b"x")
    for name in (NAME, "other", ".splitserve-folder", "..%2Fp%2Fother"):
        assert httpx.get(f"{p.url}/files/{name}").status_code in (400, 404)


def test_a_deleted_file_is_no_longer_served(p: ServedCourier, d: ServedCourier) -> None:
    wish = sealed(p)
    gone = httpx.delete(f"{p.url}/files/{NAME}")
    assert gone.json() == {"deleted": True}
    assert httpx.delete(f"{p.url}/files/{NAME}").json() == {"deleted": False}
    post(d, "/pull", wish, status=502)
    assert p.files() == d.files() == []


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a", "splitserve-.slot", NAME.upper(), NAME + "\n", "..", "x" * 200],
)
def test_other_names_are_refused(p: ServedCourier, name: str) -> None:
    error = post(p, "/seal", {**promise(b"xx", [1]), "name": name}, status=400)
    assert error["code"] == "bad_file_name"


def test_a_folder_that_is_full_refuses_and_keeps_what_it_has(
    tmp_path: Path, p: ServedCourier
) -> None:
    size_bytes = len(slot_file(TOKENS))
    with ServedCourier(tmp_path / "small", max_bytes=size_bytes + 10) as small:
        post(small, "/pull", sealed(p))
        wish = {**sealed(p), "name": name_of("b")}
        error = post(small, "/pull", wish, status=507)
        assert error["code"] == "folder_full"
        assert small.files() == [NAME]
        content = slot_file(TOKENS)
        (small.folder / name_of("c")).write_bytes(content)
        post(small, "/seal", promise(content, TOKENS, name_of("c")), status=507)
        assert small.files() == [NAME]


def test_a_key_is_asked_for_where_there_is_one(tmp_path: Path) -> None:
    with ServedCourier(tmp_path / "keyed", key="secret") as keyed:
        assert httpx.get(f"{keyed.url}/health").json() == {"status": "ok"}
        for key in ("", "wrong", "secre", "secret "):
            headers = {"authorization": f"Bearer {key}x"} if key else {}
            for method, route in (
                ("GET", "/profile"),
                ("POST", "/seal"),
                ("POST", "/pull"),
                ("POST", "/convert"),
                ("DELETE", f"/files/{NAME}"),
            ):
                reply = httpx.request(method, keyed.url + route, headers=headers, verify=False)
                assert reply.status_code == 401, (method, route)
        wish = sealed(keyed, key="secret")
        reply = httpx.get(f"{keyed.url}/profile", headers={"authorization": "bearer secret"})
        assert reply.json()["used_bytes"] == wish["size_bytes"]


@pytest.mark.parametrize("source", ["http://10.255.0.1:80", "ftp://127.0.0.1", "http://a@b", "x"])
def test_a_courier_without_a_key_fetches_on_this_machine_only(
    p: ServedCourier, d: ServedCourier, source: str
) -> None:
    wish = sealed(p)
    wish["source"]["url"] = source
    error = post(d, "/pull", wish, status=403)
    assert error["code"] == "foreign_source"


def test_only_listed_peers_are_asked(tmp_path: Path, p: ServedCourier) -> None:
    wish = sealed(p)
    with ServedCourier(tmp_path / "x", key="k", peers=("http://127.0.0.1:1",)) as other:
        error = post(other, "/pull", wish, "k", status=403)
        assert error["code"] == "foreign_source"
    with ServedCourier(tmp_path / "y", key="k", peers=(p.url + "/",)) as other:
        post(other, "/pull", wish, "k")


def test_whoever_leaves_ends_the_pull(p: ServedCourier, d: ServedCourier) -> None:
    wish = sealed(p)
    begun, left = threading.Event(), threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"q" * 64)
            self.wfile.flush()
            begun.set()
            self.rfile.read(1)  # until the courier closes the connection
            left.set()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        wish["source"]["url"] = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{d.url}/pull", json=wish, timeout=1)
        assert begun.is_set()
        assert left.wait(10)
        server.shutdown()
        thread.join()
    assert httpx.get(f"{d.url}/profile").json()["used_bytes"] == 0
    assert d.files() == []


def test_a_broken_wish_is_named(p: ServedCourier) -> None:
    reply = httpx.post(f"{p.url}/seal", json={"name": NAME, "size_bytes": -1})
    assert reply.status_code == 400
    assert "size_bytes" in reply.json()["error"]["message"]
    reply = httpx.post(f"{p.url}/seal", content=b"{", headers={"content-type": "text/plain"})
    assert reply.status_code == 400
