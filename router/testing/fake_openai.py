"""A scripted OpenAI-compatible backend: ``python -m router.testing.fake_openai --port N``.

In a test::

    async with FakeOpenAI(script=Script(chunk_delay_s=0.01)) as fake:
        ...                                  # talk to fake.url
        await fake.until(lambda f: f.open_streams == 0)
"""

import argparse
import asyncio
import ssl
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import uvloop

from router.testing.connection import FakeConnection, RecordedRequest, Switchboard
from router.testing.script import Cut, Script

UNTIL_TIMEOUT_S = 5.0
BACKLOG = 1024


class FakeOpenAI:
    """An HTTP/1.1 server with `/health`, `/v1/models`, chat and text completions, and faults.

    What it does with a request: the next of ``queue`` (POST only), else ``script``; a header
    ``x-fake: {json}`` overrides single fields (see `Script`). With ``api_key`` it answers 401 to
    every request that does not carry it. ``record_limit`` bounds ``requests``. ``base_path``
    precedes every route; ``routes`` gives status and JSON of further ones, or of these.
    """

    def __init__(
        self,
        *,
        script: Script | None = None,
        queue: Sequence[Script] = (),
        models: tuple[str, ...] = ("m",),
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        record_limit: int = 1000,
        base_path: str = "",
        routes: Mapping[str, tuple[int, object]] | None = None,
    ) -> None:
        self._board = Switchboard(script or Script(), models, api_key, record_limit)
        self._board.base_path = base_path
        self._board.routes.update(routes or {})
        self._board.queued.extend(queue)
        self._board.on_change = self._wake
        self._host = host
        self._port = port
        self._tls = tls
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: FakeConnection(self._board),
            self._host,
            self._port,
            ssl=self._tls,
            backlog=BACKLOG,
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.drop_all("rst")
        await self.until(lambda fake: fake.open_connections == 0)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """Where it serves; IPv6 literals are bracketed."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://{host}:{self._port}{self._board.base_path}"

    @property
    def routes(self) -> dict[str, tuple[int, object]]:
        """Status and JSON of routes beside its own; may be changed."""
        return self._board.routes

    @property
    def requests(self) -> list[RecordedRequest]:
        """The newest requests, oldest first."""
        return list(self._board.requests)

    @property
    def open_streams(self) -> int:
        """Generations that have begun and are neither finished nor left by the client."""
        return self._board.open_streams

    @property
    def open_connections(self) -> int:
        return len(self._board.connections)

    @property
    def connections_seen(self) -> int:
        """Connections accepted since the start."""
        return self._board.connections_seen

    @property
    def blocked_writers(self) -> int:
        """Streams that wait because the client does not read."""
        return sum(connection.blocked for connection in self._board.connections)

    def set_script(self, script: Script) -> None:
        """Replace the standing script for the requests to come."""
        self._board.script = script

    def enqueue(self, *scripts: Script) -> None:
        """Scripts for the next POST requests, one each."""
        self._board.queued.extend(scripts)

    def drop_idle(self, cut: Cut = "fin") -> int:
        """End every connection that has no request in progress; returns how many."""
        return self._drop([c for c in self._board.connections if c.idle], cut)

    def drop_all(self, cut: Cut) -> int:
        """End every connection; returns how many."""
        return self._drop(list(self._board.connections), cut)

    def _drop(self, connections: list[FakeConnection], cut: Cut) -> int:
        for connection in connections:
            connection.close(cut)
        return len(connections)

    async def until(
        self, holds: Callable[["FakeOpenAI"], bool], timeout_s: float = UNTIL_TIMEOUT_S
    ) -> None:
        """Wait until ``holds(self)``, looking again after every change. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()


async def serve(host: str, port: int, script: Script, models: tuple[str, ...]) -> None:
    """Serve until cancelled; prints the URL as the first line of stdout."""
    async with FakeOpenAI(
        script=script, models=models, host=host, port=port, record_limit=0
    ) as fake:
        sys.stdout.write(f"{fake.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A scripted fake of an OpenAI-compatible server.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--model", action="append", default=[], help="may be repeated; default m")
    parser.add_argument("--script", default="{}", help="fields of the standing script, as JSON")
    args = parser.parse_args()
    script = Script().overridden(args.script)
    try:
        uvloop.run(serve(args.host, args.port, script, tuple(args.model) or ("m",)))
    except KeyboardInterrupt:
        parser.exit(0)


if __name__ == "__main__":
    main()
