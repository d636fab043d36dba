"""Keys: who may ask, who may administrate, and that keys stay here."""

from collections.abc import AsyncIterator

import pytest

from router.errors import SettingsError
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter

CHAT = "/v1/chat/completions"
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TENANTS = [{"name": "alice", "key_env": "ALICE"}, {"name": "bob", "key_env": "BOB"}]
ADMIN = {"key_env": "ADMIN"}
ENVIRON = {"ALICE": "key-a", "BOB": "key-b", "ADMIN": "key-admin"}


@pytest.fixture
async def engine() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
async def guarded(engine: FakeOpenAI) -> AsyncIterator[LoopbackRouter]:
    worker = {"url": engine.url, "name": "e"}
    async with LoopbackRouter(worker, environ=ENVIRON, tenants=TENANTS, admin=ADMIN) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        {"authorization": "Bearer"},
        bearer("key-a2"),
        {"authorization": "key-a"},
        {"authorization": "Basic key-a"},
        bearer("key-admin"),
    ],
)
async def test_without_a_tenants_key(guarded: LoopbackRouter, headers: dict[str, str]) -> None:
    for answer in (
        await guarded.client.post(CHAT, json=PLAIN, headers=headers),
        await guarded.client.get("/v1/models", headers=headers),
        await guarded.client.get("/v1/models/m", headers=headers),
    ):
        assert answer.status_code == 401
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert "key-" not in error["message"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_with_a_tenants_key(engine: FakeOpenAI, guarded: LoopbackRouter, scheme: str) -> None:
    headers = {"authorization": f"{scheme} key-b"}
    answer = await guarded.client.post(CHAT, json=PLAIN, headers=headers)
    assert answer.status_code == 200
    assert "key-b" not in str(engine.requests[-1].headers)
    assert (await guarded.client.get("/v1/models", headers=headers)).status_code == 200
    record = guarded.app.dispatcher.records.latest(1)[0]
    assert record.request.tenant == "bob"


ADMIN_CALLS = [
    ("GET", "/admin/workers"),
    ("POST", "/admin/workers"),
    ("PATCH", "/admin/workers/e"),
    ("DELETE", "/admin/workers/e"),
    ("GET", "/admin/requests/x"),
    ("GET", "/admin/decisions"),
]


@pytest.mark.parametrize("method,path", ADMIN_CALLS)
async def test_admin_needs_its_own_key(guarded: LoopbackRouter, method: str, path: str) -> None:
    for headers in ({}, bearer("key-a"), bearer("wrong")):
        answer = await guarded.client.request(method, path, json={"url": 5}, headers=headers)
        assert answer.status_code == 401
    assert list(guarded.app.registry.members) == ["e"]


async def test_admin_key_opens_admin(guarded: LoopbackRouter) -> None:
    answer = await guarded.client.get("/admin/workers", headers=bearer("key-admin"))
    assert [w["id"] for w in answer.json()["workers"]] == ["e"]


@pytest.mark.parametrize("method,path", ADMIN_CALLS)
async def test_admin_is_off_with_tenants_and_without_its_key(
    engine: FakeOpenAI, method: str, path: str
) -> None:
    worker = {"url": engine.url, "name": "e"}
    async with LoopbackRouter(worker, environ=ENVIRON, tenants=TENANTS) as router:
        answer = await router.client.request(method, path, json={}, headers=bearer("key-a"))
        assert answer.status_code == 403
        assert "admin.key_env" in answer.json()["error"]["message"]


async def test_forcing_needs_the_admin_key_where_tenants_are(guarded: LoopbackRouter) -> None:
    forced = {"x-splitserve-worker": "e"}

    async def status(key: str) -> int:
        headers = {**forced, **bearer(key)}
        return (await guarded.client.post(CHAT, json=PLAIN, headers=headers)).status_code

    assert await status("wrong") == 401
    assert await status("key-a") == 403
    assert await status("key-admin") == 200


async def test_health_and_metrics_need_no_key(guarded: LoopbackRouter) -> None:
    for path in ("/health", "/ready", "/metrics"):
        assert (await guarded.client.get(path)).status_code == 200


async def test_keys_are_in_no_record(guarded: LoopbackRouter) -> None:
    await guarded.client.post(CHAT, json=PLAIN, headers=bearer("key-a"))
    shown = await guarded.client.get("/admin/decisions", headers=bearer("key-admin"))
    assert "key-a" not in shown.text
    assert "key-a" not in (await guarded.client.get("/metrics")).text


@pytest.mark.parametrize("environ", [{}, {"ADMIN": ""}])
def test_key_that_is_not_set_does_not_open_the_door(environ: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match="ADMIN is not set"):
        LoopbackRouter(admin=ADMIN, environ=environ)
