"""The KV side of fake vLLM servers: blocks kept for a lease, pushes that wait for their partner,
files in a shared folder. As strict and as careless as the real one: it dies of an object of which a
part is missing, and it reads blocks whose lease is over without a word.
"""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ADDRESS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
PUSH_ADDRESS = ("remote_engine_id", "remote_host", "remote_port", "tp_size")


class EngineDied(Exception):
    """The engine's core has ended, and with it the server."""


class TransferRefused(Exception):
    """The KV did not come, and the engine is set to fail then."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What decides about KV: the text, and its length."""

    text: str
    tokens: int


@dataclass(slots=True)
class Lease:
    """Blocks that P keeps. `renewed`: a decode worker has it and says so."""

    prompt: Prompt
    until_s: float
    renewed: bool = False


@dataclass(slots=True)
class Counters:
    """What `/metrics` shows, in tokens and in events."""

    local_compute: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    late_reads: int = 0
    expired: int = 0
    into_freed: int = 0
    """Pushes into blocks of a request that was given up: another one's KV is spoilt."""


@dataclass(slots=True)
class Registration:
    """D's blocks for one request, for P to write into."""

    pushed: asyncio.Event
    given_up: bool = False


@dataclass(slots=True)
class KvEngine:
    """One engine's connector. `clock` is its own; engines of one `Fabric` reach each other."""

    engine_id: str
    host: str
    port: int
    lease_s: float
    clock: Callable[[], float]
    fabric: "Fabric"
    recomputes: bool = True
    counters: Counters = field(default_factory=Counters)
    leases: dict[str, Lease] = field(default_factory=dict)
    registered: dict[str, Registration] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)
    gate: asyncio.Event | None = None
    """Waited for before a pull or a push is looked for, like a first handshake."""
    at_gate: int = 0
    on_change: Callable[[], None] = lambda: None
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def keep(self, request_id: str, prompt: Prompt) -> dict[str, object]:
        """Keep a prefilled prompt's blocks; returns the object that P answers with."""
        number = next(self.numbers)
        full_id = f"cmpl-{request_id}-0-{number:08x}"
        self.leases[full_id] = Lease(prompt, self.clock() + self.lease_s)
        self._push(request_id, full_id)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[number, number + 1]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": full_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": prompt.tokens,
            "remote_blocks_expiry_time": None,
            "remote_prefill_cached_tokens": 0,
        }

    def _push(self, request_id: str, full_id: str) -> None:
        known = self.registered.pop(request_id, None)
        if known is not None:
            del self.leases[full_id]
            self.counters.into_freed += known.given_up
            known.pushed.set()

    def alive(self, full_id: str) -> Lease | None:
        """Return a lease that is not over; one that is gets counted and forgotten."""
        lease = self.leases.get(full_id)
        if lease is not None and not lease.renewed and self.clock() > lease.until_s:
            del self.leases[full_id]
            self.counters.expired += 1
            return None
        return lease

    async def pull(self, params: Mapping[str, Any], prompt: Prompt) -> bool:
        """Read P's blocks; False when something else is in them by now.

        Raises EngineDied for params it does not survive, and TransferRefused.
        """
        if not params.get("remote_block_ids"):
            raise EngineDied("assert num_external_tokens == 0")
        if any(params.get(name) is None for name in ADDRESS):
            await self._hang()
        source = self.fabric.engines.get(params["remote_engine_id"])
        if source is None or (source.host, source.port) != (
            params["remote_host"], params["remote_port"]
        ):  # fmt: skip
            self._recompute(prompt, "handshake failed")
            return True
        full_id = params["remote_request_id"]
        if source.engine_id in self.met and (lease := source.alive(full_id)) is not None:
            lease.renewed = True  # from the moment the request is here
        await self._pass_gate()
        self.met.add(source.engine_id)
        self.counters.external_kv_transfer += prompt.tokens
        lease = source.alive(full_id)
        if lease is None:
            source.counters.late_reads += 1
            return False
        del source.leases[full_id]
        return lease.prompt == prompt

    async def register(self, request_id: str, params: Mapping[str, Any], prompt: Prompt) -> None:
        """Wait until P has written this request's blocks, however long that takes."""
        if any(params.get(name) is None for name in PUSH_ADDRESS):
            raise EngineDied("KeyError")
        source = self.fabric.engines.get(params["remote_engine_id"])
        if source is None or source.port != params["remote_port"]:
            await asyncio.Event().wait()
            return
        await self._pass_gate()
        finished = [f for f in source.leases if f.startswith(f"cmpl-{request_id}-0-")]
        if finished and source.alive(finished[0]) is not None:
            del source.leases[finished[0]]
        else:
            mine = source.registered[request_id] = Registration(asyncio.Event())
            try:
                await mine.pushed.wait()
            except asyncio.CancelledError:
                mine.given_up = True  # P does not hear of it
                raise
        self.counters.external_kv_transfer += prompt.tokens

    async def _pass_gate(self) -> None:
        if self.gate is not None:
            self.at_gate += 1
            self.on_change()
            await self.gate.wait()
            self.at_gate -= 1

    async def _hang(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as left:
            raise EngineDied("the request that hung was aborted") from left

    def _recompute(self, prompt: Prompt, why: str) -> None:
        if not self.recomputes:
            raise TransferRefused(why)
        self.counters.local_compute += prompt.tokens

    def save_files(self, prompt: Prompt, block_tokens: int) -> None:
        """Write a prompt's whole blocks into the shared folder, unless they seem to be there."""
        if (prompt.text, (prompt.tokens - 2) // block_tokens) not in self.fabric.files:
            self.fabric.files.add((prompt.text, (prompt.tokens - 1) // block_tokens))

    def load_files(self, prompt: Prompt, block_tokens: int) -> int:
        """Return how many tokens the folder has for a prompt."""
        blocks = max(0, prompt.tokens - 2) // block_tokens
        there = (prompt.text, blocks) in self.fabric.files
        return blocks * block_tokens if there else 0


@dataclass(slots=True)
class Fabric:
    """What engines reach each other over."""

    engines: dict[str, KvEngine] = field(default_factory=dict)
    files: set[tuple[str, int]] = field(default_factory=set)
