"""The courier's folder: names, room, age, tickets; and who may be fetched from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from workers.courier.errors import BadFileName, BadSlotFile, FolderFull, ForeignSource, NotSealed
from workers.courier.model_file import describe
from workers.courier.peers import Peers, origin_of
from workers.courier.settings import CourierSettings, is_loopback
from workers.courier.slot_head import tokens_digest
from workers.courier.store import Promise, Store
from workers.courier.testing.slot_files import slot_file
from workers.errors import BadSetting

TOKENS = [3, 4, 5]
CONTENT = slot_file(TOKENS)


def name(number: int = 0) -> str:
    return f"splitserve-{number:032x}.slot"


def promise(number: int = 0, checksum: str = "") -> Promise:
    return Promise(name(number), len(CONTENT), len(TOKENS), tokens_digest(TOKENS), checksum)


def store(folder: Path, max_bytes: int = 1 << 20) -> Store:
    return Store(folder, max_bytes, max_age_s=60.0)


def test_only_names_of_our_own(tmp_path: Path) -> None:
    known = store(tmp_path)
    assert known.path(name()) == tmp_path / name()
    for bad in ("", ".", "..", "a", "../" + name(), name() + "/", name().upper(), name() + "\n"):
        with pytest.raises(BadFileName):
            known.path(bad)


def test_a_sealed_file_is_had_with_its_ticket_only(tmp_path: Path) -> None:
    known = store(tmp_path)
    (tmp_path / name()).write_bytes(CONTENT)
    seal = known.seal(promise())
    assert known.ticketed(name(), seal.ticket) == tmp_path / name()
    for ticket in ("", "0" * 32, seal.ticket[:-1], "é"):
        with pytest.raises(NotSealed):
            known.ticketed(name(), ticket)
    assert known.check(promise(checksum=seal.checksum)) == seal.checksum
    with pytest.raises(BadSlotFile, match="not those that were sealed"):
        known.check(promise(checksum="0" * 32))


def test_two_couriers_see_the_same_folder(tmp_path: Path) -> None:
    first, second = store(tmp_path), store(tmp_path)
    (tmp_path / "other").mkdir()
    assert first.folder_id == second.folder_id
    assert first.folder_id != store(tmp_path / "other").folder_id
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == [".splitserve-folder"]


def test_room_is_counted_while_it_is_held(tmp_path: Path) -> None:
    known = store(tmp_path, max_bytes=100)
    with known.room(name(1), 60) as part:
        part.write_bytes(b"x" * 10)
        assert known.used_bytes() == 60
        with pytest.raises(FolderFull, match="raise --max-bytes"):
            with known.room(name(2), 41):
                pass
        with known.room(name(2), 40) as other:
            other.write_bytes(b"x" * 40)
            known.keep(other, name(2))
    assert known.used_bytes() == 40
    assert sorted(each.name for each in tmp_path.iterdir()) == [".splitserve-folder", name(2)]


def test_files_of_others_count_for_nothing_and_stay(tmp_path: Path) -> None:
    kept = [tmp_path / "mine.bin", tmp_path / "splitserve-notes", tmp_path / f"{name()}.bak"]
    for path in kept:
        path.write_bytes(b"x" * 1000)
        os.utime(path, (0, 0))
    known = store(tmp_path, max_bytes=100)
    assert known.used_bytes() == 0
    assert known.sweep(1e12) == 0
    assert all(path.exists() for path in kept)


def test_old_files_are_removed_and_young_ones_stay(tmp_path: Path) -> None:
    known = store(tmp_path)
    old, young, part = (
        tmp_path / name(1),
        tmp_path / name(2),
        tmp_path / f"{name(3)}.{'a' * 16}.part",
    )
    for path, at_s in ((old, 1000), (young, 1050), (part, 1000)):
        path.write_bytes(CONTENT)
        os.utime(path, (at_s, at_s))
    ticket = known.seal(promise(1)).ticket
    with known.room(name(4), 10) as held:
        held.write_bytes(b"x")
        os.utime(held, (0, 0))
        assert known.sweep(1061) == 2
        assert held.exists(), "it is being written"
    assert [old.exists(), young.exists(), part.exists()] == [False, True, False]
    with pytest.raises(NotSealed):
        known.ticketed(name(1), ticket)


def test_a_seal_on_a_full_folder_deletes_the_file(tmp_path: Path) -> None:
    known = store(tmp_path, max_bytes=len(CONTENT))
    (tmp_path / name(1)).write_bytes(CONTENT)
    known.seal(promise(1))
    (tmp_path / name(2)).write_bytes(CONTENT)
    with pytest.raises(FolderFull):
        known.seal(promise(2))
    assert not (tmp_path / name(2)).exists()
    assert (tmp_path / name(1)).exists()


@pytest.mark.parametrize(
    "url,origin",
    [
        ("http://10.0.0.5:8090", "http://10.0.0.5:8090"),
        ("http://10.0.0.5", "http://10.0.0.5:80"),
        ("https://box/", "https://box:443"),
        ("http://[::1]:8090", "http://[::1]:8090"),
        ("http://BOX:1", "http://box:1"),
        ("http://u:p@box", None),
        ("http://box/path", None),
        ("http://box?x", None),
        ("file:///etc/passwd", None),
        ("http://", None),
        ("http://box:99999", None),
        ("box:8090", None),
    ],
)
def test_what_is_a_couriers_address(url: str, origin: str | None) -> None:
    assert origin_of(url) == origin


def test_without_a_key_only_this_machine_is_fetched_from() -> None:
    peers = Peers((), keyed=False)
    for url in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1", "http://127.9.9.9"):
        assert peers.check(url) == origin_of(url)
    for url in ("http://10.0.0.1", "http://169.254.169.254", "http://127.0.0.1.example.org"):
        with pytest.raises(ForeignSource):
            peers.check(url)


def test_with_a_list_only_those_on_it_are_fetched_from() -> None:
    peers = Peers(("http://a:1/", "http://b"), keyed=True)
    assert peers.check("http://a:1") == "http://a:1"
    assert peers.check("http://b:80") == "http://b:80"
    for url in ("http://a:2", "https://a:1", "http://127.0.0.1:1"):
        with pytest.raises(ForeignSource):
            peers.check(url)
    assert Peers((), keyed=True).check("http://anywhere:5") == "http://anywhere:5"


def test_settings_that_cannot_be_used(tmp_path: Path) -> None:
    CourierSettings(tmp_path, host="0.0.0.0", key="k")
    cases: list[tuple[dict[str, object], str]] = [
        ({"folder": tmp_path / "gone"}, "folder"),
        ({"host": "0.0.0.0"}, "host"),
        ({"host": "box"}, "host"),
        ({"port": 70_000}, "port"),
        ({"max_bytes": 0}, "max-bytes"),
        ({"max_age_s": 0.0}, "max-age-s"),
        ({"peers": ("box",)}, "peer"),
        ({"model": tmp_path}, "model"),
        ({"examples": tmp_path / "gone"}, "examples"),
        ({"examples": tmp_path}, "examples"),
    ]
    for fields, named in cases:
        with pytest.raises(BadSetting) as caught:
            CourierSettings(**{"folder": tmp_path, **fields})  # type: ignore[arg-type]
        assert caught.value.name == named


@pytest.mark.parametrize(
    "host,inside", [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True),
                    ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("box", False)]
)  # fmt: skip
def test_what_only_this_machine_reaches(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside


def test_model_files_are_told_apart_by_a_sample(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"a" * 3_000_000)
    other.write_bytes(b"a" * 2_999_999 + b"b")
    described = describe(one)
    assert (described.name, described.size_bytes) == ("one", 3_000_000)
    assert described.sampled_hash == describe(one).sampled_hash
    assert described.sampled_hash != describe(other).sampled_hash
    other.write_bytes(b"a" * 2_999_999)
    assert described.sampled_hash != describe(other).sampled_hash


def test_of_a_large_file_head_and_tail_are_in_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    before = describe(path)
    for at in (0, (200 << 20) - 1):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(b"x")
        after = describe(path)
        assert after.sampled_hash != before.sampled_hash
        before = after
