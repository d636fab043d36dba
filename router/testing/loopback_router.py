"""A whole router on a free loopback port of the running event loop, for tests.

In a test::

    async with FakeOpenAI() as fake, LoopbackRouter({"url": fake.url}) as router:
        answer = await router.client.post("/v1/chat/completions", json=...)
        await router.idle()                  # raises when anything was left behind

The server is the one that `splitserve route` runs, with its protocol and its lifespan; only the
loop that waits for signals is left out.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import uvicorn

from router.app import RouterApp, build_server
from router.origin import parse_origin
from router.settings import build
from router.testing.fake_native import FakeNative
from splitserve.messages import Command, Event

NOT_OF_REQUESTS = ("FakeConnection", "Registry._watch")
NEVER_S = 3600.0
TIMEOUT_S = 5.0
JOIN_S = 30.0
LOOK_AGAIN_S = 0.05  # for what changes without an event, like a poll that fails
C = TypeVar("C", bound=Command)


class LoopbackRouter:
    """Starts with `async with`, once every worker has joined (unless `wait` is False).

    `workers` are entries of the configuration; more of it may be given as `settings`. Workers are
    polled only when they are poked, unless `report_interval_s` says otherwise, and get no request
    but those of clients, unless `probe_speeds` or `shadow_check` is given. `timeout_s` is how long
    to wait for an answer, for workers to join and for requests to end.
    """

    def __init__(
        self,
        *workers: Mapping[str, Any],
        environ: Mapping[str, str] | None = None,
        wait: bool = True,
        timeout_s: float = TIMEOUT_S,
        **settings: Any,
    ) -> None:
        quiet: dict[str, Any] = {
            "report_interval_s": NEVER_S,
            "probe_speeds": False,
            "shadow_check": {"share": 0.0, "at_join": False},
        }
        settings = {**quiet, "workers": list(workers), **settings}
        self.app = RouterApp(build(settings), environ or {})
        self.steps: list[tuple[Event, list[Command]]] = []
        self._wait = wait
        self._timeout_s = timeout_s
        self._changed = asyncio.Event()
        self._step = self.app.scheduler.step
        self.app.scheduler.step = self._watched_step  # type: ignore[method-assign]

    def _watched_step(self, event: Event, now_s: float) -> list[Command]:
        commands = self._step(event, now_s)
        self.steps.append((event, commands))
        self._changed.set()
        return commands

    async def __aenter__(self) -> Self:
        self._server = build_server(self.app)
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await self._server.startup([listener])
        # Reading the system's certificates takes longer than most tests, and nothing here is TLS.
        self.client = httpx.AsyncClient(base_url=self.url, timeout=self._timeout_s, verify=False)
        try:
            if self._wait:
                await self._all_joined()
        except BaseException:
            await self._stop()
            raise
        self._tasks = asyncio.all_tasks()
        return self

    async def _all_joined(self) -> None:
        members = self.app.registry.members.values()

        def joined() -> bool:
            for member in members:
                if not member.alive and member.misses:  # as on a machine too busy to answer in time
                    self.app.registry.poke(member.worker_id)
            return all(member.alive for member in members)

        try:
            await self.until(joined, max(JOIN_S, self._timeout_s))
        except TimeoutError as error:
            troubles = {member.worker_id: member.trouble for member in members}
            raise TimeoutError(f"not all workers joined: {troubles}") from error

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        """What `Server.shutdown` does, without its pauses."""
        await self.client.aclose()
        for server in self._server.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=TIMEOUT_S)
        await self._server.lifespan.shutdown()

    @property
    def server_state(self) -> uvicorn.server.ServerState:
        """The server's connections and running requests."""
        return self._server.server_state

    async def until(self, holds: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait until `holds()`, looking again after every event of the scheduler, and now and then.

        Raises TimeoutError.
        """
        async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
            while not holds():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), LOOK_AGAIN_S)

    async def idle(self) -> None:
        """Wait until no request lives, then raise AssertionError for anything left behind."""
        dispatcher, scheduler = self.app.dispatcher, self.app.scheduler
        await self.until(lambda: dispatcher.live == 0 and scheduler.live == 0)
        await self.until(self._pools_idle)
        begun = asyncio.all_tasks() - self._tasks - {asyncio.current_task()}
        mine = [t for t in begun if not any(name in repr(t) for name in NOT_OF_REQUESTS)]
        left = (await asyncio.wait(mine, timeout=self._timeout_s))[1] if mine else set()
        assert not left, f"tasks still run: {left}"
        assert scheduler.queued == 0
        for account in scheduler.ledger.workers.values():
            worker_id = account.snapshot.worker_id
            assert account.bookings == {}, f"{worker_id} has bookings: {account.bookings}"
            assert account.pending_prefill_tokens == 0
            assert account.booked_kv_tokens == 0

    def _pools_idle(self) -> bool:
        origins = {member.origin for member in self.app.registry.members.values()}
        return all(self.app.upstream.pool(origin).in_use == 0 for origin in origins)

    def in_use(self, worker_url: str) -> int:
        """Connections to a worker that serve a request now."""
        return self.app.upstream.pool(parse_origin(worker_url)).in_use

    async def record(self, response: httpx.Response) -> dict[str, Any]:
        """Fetch the decision record of an answer."""
        request_id = response.headers["x-splitserve-request-id"]
        answer = await self.client.get(f"/admin/requests/{request_id}")
        assert answer.status_code == 200, answer.text
        record: dict[str, Any] = answer.json()
        return record

    def latest(self) -> dict[str, Any]:
        """The newest decision record."""
        return self.app.dispatcher.records.latest(1)[0].to_json()


@dataclass(frozen=True, slots=True)
class Split:
    """A router in front of one prefill and one decode worker."""

    router: LoopbackRouter
    prefill: FakeNative
    decode: FakeNative

    def commands(self, kind: type[C]) -> list[C]:
        """What the scheduler has ordered so far, of one kind."""
        return [c for _, commands in self.router.steps for c in commands if isinstance(c, kind)]
