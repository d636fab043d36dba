"""vLLM's KV becomes a slot file over HTTP: only from the folder that is shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.unit.workers.courier.test_convert import BLOCK, Prefill, gguf_file, lengthened
from workers.courier.convert import ModelLayout
from workers.courier.slot_file import KvType, read_slot
from workers.courier.testing.served_courier import ServedCourier

NAME = f"splitserve-{'0' * 32}.slot"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return gguf_file(tmp_path)


@pytest.fixture
def courier(tmp_path: Path, model: Path) -> Iterator[ServedCourier]:
    (tmp_path / "shared").mkdir()
    with ServedCourier(tmp_path / "slots", model=model, examples=tmp_path / "shared") as served:
        yield served


def layout_of(model: Path) -> ModelLayout:
    from workers.courier.convert import layout_of_gguf

    return layout_of_gguf(model, KvType.F32)


def wish(folder: Path, sent: list[int]) -> dict[str, Any]:
    return {
        "name": NAME,
        "folder": str(folder),
        "token_ids": sent,
        "block_tokens": BLOCK,
        "prompt_tokens": len(PROMPT),
        "kv_type": "f32",
    }


def test_a_prompts_kv_is_converted(tmp_path: Path, courier: ServedCourier, model: Path) -> None:
    sent = lengthened(PROMPT)
    prefilled = Prefill(tmp_path / "shared", sent, layout_of(model)).save()
    reply = httpx.post(f"{courier.url}/convert", json=wish(tmp_path / "shared", sent))
    assert reply.status_code == 200, reply.text
    made = courier.folder / NAME
    assert reply.json() == {"size_bytes": made.stat().st_size, "tokens": len(PROMPT) - 1}
    assert list(read_slot(made).token_ids) == PROMPT[:-1]
    assert not prefilled.folder.exists()
    assert httpx.get(f"{courier.url}/profile").json()["converts"] is True


def test_kv_that_is_not_there(tmp_path: Path, courier: ServedCourier) -> None:
    reply = httpx.post(f"{courier.url}/convert", json=wish(tmp_path / "shared", [1] * 20))
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == "kv_missing"
    assert courier.files() == []


@pytest.mark.parametrize("folder", ["/etc", "/", "shared/..", "shared/../slots"])
def test_other_folders_are_not_read(tmp_path: Path, courier: ServedCourier, folder: str) -> None:
    place = Path(folder) if folder.startswith("/") else tmp_path / folder
    reply = httpx.post(f"{courier.url}/convert", json=wish(place, [1] * 20))
    assert reply.status_code == 422
    assert "--examples" in reply.json()["error"]["message"]


def test_a_courier_that_was_told_of_no_folder(tmp_path: Path) -> None:
    with ServedCourier(tmp_path / "slots") as plain:
        reply = httpx.post(f"{plain.url}/convert", json=wish(tmp_path, [1] * 20))
        assert reply.status_code == 422
        assert httpx.get(f"{plain.url}/profile").json()["converts"] is False


@pytest.mark.parametrize("change", [{"name": "../x"}, {"kv_type": "q4_0"}, {"token_ids": [1]}])
def test_wishes_that_are_refused(
    tmp_path: Path, courier: ServedCourier, change: dict[str, Any]
) -> None:
    body = {**wish(tmp_path / "shared", [1] * 20), **change}
    assert httpx.post(f"{courier.url}/convert", json=body).status_code == 400
