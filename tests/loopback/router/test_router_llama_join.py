"""Which llama-servers take part in hand-offs, and what a person is told of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.testing.fake_llama import FakeLlama
from router.testing.loopback_router import LoopbackRouter
from splitserve.messages import Role, WorkerSnapshot
from workers.courier.testing.served_courier import ServedCourier

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "how long is the river"}]}


def snapshot(router: LoopbackRouter, name: str = "one") -> WorkerSnapshot:
    found = router.app.registry.members[name].snapshot
    assert found is not None
    return found


async def told(router: LoopbackRouter, name: str = "one") -> dict[str, Any]:
    workers = (await router.client.get("/admin/workers")).json()["workers"]
    return next(worker for worker in workers if worker["id"] == name)


async def test_a_server_with_a_courier_takes_part(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    async with FakeLlama(folder=tmp_path, slots=3, context_tokens=512) as fake:
        with ServedCourier(tmp_path, model=model) as courier:
            entry = {"url": fake.url, "name": "one", "courier": courier.url}
            async with LoopbackRouter(entry) as router:
                known = snapshot(router)
                assert known.engine == "llama.cpp"
                assert known.role is Role.AUTO
                assert known.connector == "llama-slots"
                assert known.max_running == 3
                assert known.max_context_tokens == known.kv_capacity_tokens == 512
                assert known.kv_bytes_per_token == 2 * 8 + 16
                fields = dict(part.split("=") for part in known.pairing_key.split(";"))
                assert fields.pop("weights").endswith("7 bytes")
                assert fields == {
                    "build": "b11434-fake", "kv": "f16/f16", "v_order": "rows", "streams": "1",
                    "shape": "1x8/8",
                }  # fmt: skip
                assert (await told(router))["why_whole"] is None
                assert courier.files() == []
                await router.idle()


@pytest.mark.parametrize("metrics", [True, False], ids=["metrics", "slots"])
async def test_without_a_courier_it_serves_whole(metrics: bool) -> None:
    async with FakeLlama(metrics=metrics) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "one"}) as router:
            known = snapshot(router)
            assert (known.engine, known.role, known.connector) == (
                "llama.cpp", Role.AGGREGATED, "",
            )  # fmt: skip
            assert "no courier is configured" in (await told(router))["why_whole"]
            answer = await router.client.post(CHAT, json=BODY)
            assert answer.status_code == 200
            assert b"id_slot" not in fake.calls()[-1].body  # its slots are its own affair
            await router.idle()


@pytest.mark.parametrize(
    "flags,mend",
    [
        ({"clears_idle": True}, "--no-cache-idle-slots"),
        ({"reuses_restored": False}, "--swa-full"),
        ({"folder": None}, "--slot-save-path"),
    ],
    ids=["idle slots are wiped", "sliding windows", "no folder"],
)
async def test_unsafe_flags_are_named(tmp_path: Path, flags: dict[str, Any], mend: str) -> None:
    async with FakeLlama(**{"folder": tmp_path, **flags}) as fake:
        with ServedCourier(tmp_path) as courier:
            entry = {"url": fake.url, "name": "one", "courier": courier.url}
            async with LoopbackRouter(entry) as router:
                assert snapshot(router).connector == ""
                assert mend in (await told(router))["why_whole"]
                answer = await router.client.post(CHAT, json=BODY)
                assert answer.headers["x-splitserve-plan"] == "aggregated"
                assert courier.files() == []
                await router.idle()


async def test_one_slot_cannot_be_wiped_by_another(tmp_path: Path) -> None:
    async with FakeLlama(folder=tmp_path, slots=1, clears_idle=True) as fake:
        with ServedCourier(tmp_path) as courier:
            entry = {"url": fake.url, "name": "one", "courier": courier.url}
            async with LoopbackRouter(entry) as router:
                assert snapshot(router).connector == "llama-slots"


async def test_a_courier_of_another_folder_is_noticed(tmp_path: Path) -> None:
    async with FakeLlama(folder=tmp_path / "slots") as fake:
        with ServedCourier(tmp_path / "elsewhere") as courier:
            entry = {"url": fake.url, "name": "one", "courier": courier.url}
            async with LoopbackRouter(entry) as router:
                assert snapshot(router).connector == ""
                assert "HTTP 404" in (await told(router))["why_whole"]


async def test_a_wrong_key_is_noticed(tmp_path: Path) -> None:
    async with FakeLlama(folder=tmp_path) as fake:
        with ServedCourier(tmp_path, key="right") as courier:
            entry = {
                "url": fake.url, "name": "one", "courier": courier.url, "courier_key_env": "KEY",
            }  # fmt: skip
            async with LoopbackRouter(entry, environ={"KEY": "wrong"}) as router:
                assert "HTTP 401" in (await told(router))["why_whole"]


async def test_a_courier_that_comes_later_is_found(tmp_path: Path) -> None:
    with ServedCourier(tmp_path) as gone:
        port = int(gone.url.rpartition(":")[2])
    async with FakeLlama(folder=tmp_path) as fake:
        entry = {"url": fake.url, "name": "one", "courier": gone.url}
        async with LoopbackRouter(entry) as router:
            assert snapshot(router).connector == ""
            assert "cannot connect" in (await told(router))["why_whole"]
            with ServedCourier(tmp_path, listen_port=port):
                router.app.registry.poke("one")
                await router.until(lambda: snapshot(router).connector == "llama-slots")
                assert (await told(router))["why_whole"] is None
                await router.idle()


async def test_a_busy_server_is_tried_out_when_it_is_idle(tmp_path: Path) -> None:
    async with FakeLlama(folder=tmp_path) as fake:
        with ServedCourier(tmp_path) as courier:
            await fake.slots[0].busy.acquire()
            entry = {"url": fake.url, "name": "one", "courier": courier.url}
            async with LoopbackRouter(entry) as router:
                assert "must be idle" in (await told(router))["why_whole"]
                assert fake.calls("/completion") == []
                fake.slots[0].busy.release()
                router.app.registry.poke("one")
                await router.until(lambda: snapshot(router).connector == "llama-slots")


async def test_a_restart_is_noticed_and_tried_anew(tmp_path: Path) -> None:
    async with FakeLlama(folder=tmp_path, clears_idle=True) as fake:
        with ServedCourier(tmp_path) as courier:
            entry = {"url": fake.url, "name": "one", "courier": courier.url}
            async with LoopbackRouter(entry) as router:
                assert snapshot(router).connector == ""
                fake.flags.marker, fake.flags.clears_idle = "<__media_second__>", False
                router.app.registry.poke("one")
                member = router.app.registry.members["one"]
                await router.until(
                    lambda: member.snapshot is not None and bool(member.snapshot.connector)
                )


@pytest.mark.parametrize(
    "change,field",
    [({"parameters": 999}, "weights"), ({"build": "b2"}, "build"), ({"streams": 4}, "streams")],
)
async def test_a_pair_that_does_not_fit_is_refused_with_the_reason(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    places = tmp_path / "p", tmp_path / "d"
    async with FakeLlama(folder=places[0]) as p, FakeLlama(folder=places[1], **change) as d:
        with ServedCourier(places[0]) as pc, ServedCourier(places[1]) as dc:
            workers = (
                {"url": p.url, "name": "p", "role": "prefill", "courier": pc.url},
                {"url": d.url, "name": "d", "role": "decode", "courier": dc.url},
            )
            async with LoopbackRouter(*workers) as router:
                (pair,) = (await told(router, "p"))["pairs"]
                assert not pair["ok"]
                assert field in pair["why_not"]
                answer = await router.client.post(CHAT, json=BODY)
                assert answer.headers["x-splitserve-plan"] == "aggregated"
                await router.idle()


async def test_a_model_called_by_its_path_has_its_files_name_too() -> None:
    async with FakeLlama(models=("/srv/models/small.gguf",)) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "one"}) as router:
            assert snapshot(router).models == ("/srv/models/small.gguf", "small.gguf")


async def test_a_server_between_two_long_steps_keeps_its_figures(tmp_path: Path) -> None:
    async with FakeLlama() as fake:
        async with LoopbackRouter({"url": fake.url, "name": "one"}) as router:
            known = replace(snapshot(router), running=3)
            gate = fake.hold("gauges")
            fresh = await router.app.dispatcher.backends["one"].load(known)
            assert fake.held("gauges") == 1
            assert fresh == known
            gate.set()
            later = await router.app.dispatcher.backends["one"].load(known)
            assert later.running == 0
