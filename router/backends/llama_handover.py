"""Slot files on their way: out of one server, through two couriers, into another server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from router.backends.background import Background
from router.backends.base import EngineRefused, quoted_error
from router.backends.courier_client import CourierClient, Parcel, Saved, tokens_digest
from router.backends.llama_check import SlotFacts, new_name
from router.backends.llama_server import LlamaServer
from router.backends.llama_slots import Lease, SlotTable
from router.errors import HandoffFailed, UpstreamError
from splitserve.messages import Handoff

CONNECTOR = "llama-slots"
EXAMPLE_FILES = "vllm-example"


class ExampleClaim(msgspec.Struct):
    """What is read of a hand-off of vLLM's ExampleConnector.

    `token_ids` are what was prefilled, of which the first `prompt_tokens` are the prompt.
    """

    folder: str
    token_ids: list[int]
    block_tokens: int
    prompt_tokens: int | None = None


def promised_tokens(handoff: Handoff) -> int:
    """Return how many prompt tokens a decode worker need not compute."""
    if handoff.connector == CONNECTOR:
        return msgspec.json.decode(handoff.attributes, type=Parcel).saved.tokens
    claim = msgspec.json.decode(handoff.attributes, type=ExampleClaim)
    return (claim.prompt_tokens or len(claim.token_ids)) - 1


def spent_s(handoff: Handoff) -> float:
    """Return the seconds that the prefill side has spent on a file beside computing it."""
    if handoff.connector != CONNECTOR:
        return 0.0
    return msgspec.json.decode(handoff.attributes, type=Parcel).spent_s


class Handover:
    """One server's side of hand-offs: its slots, and the courier of its folder.

    What goes wrong is HandoffFailed, or the server's own UpstreamError. A file is deleted here
    when it was not needed, however that came about.
    """

    def __init__(self, server: LlamaServer, courier: CourierClient, facts: SlotFacts) -> None:
        self.facts = facts
        self.slots = SlotTable(facts.slots)
        self._server = server
        self._courier = courier
        self._background = Background()

    async def save(self, lease: Lease, ids: Sequence[int]) -> Parcel:
        """Save a slot that holds `ids`, and have the courier check the file; ends the lease.

        Cancelling it ends nothing: the server saves all the same, and only then is the slot free
        and the file there to be deleted.
        """
        name = new_name()
        saving = self._background.start(self._save(lease, name, ids))
        try:
            return await asyncio.shield(saving)
        except asyncio.CancelledError:
            saving.add_done_callback(lambda _: self.discard(name))
            raise

    async def _save(self, lease: Lease, name: str, ids: Sequence[int]) -> Parcel:
        now_s = asyncio.get_running_loop().time
        begun_s = now_s()
        try:
            try:
                written = await self._server.save(lease.slot, name)
            finally:
                lease.give_back()
            if written.n_saved != len(ids):
                cause = f"its slot held {written.n_saved} tokens of {len(ids)}"
                raise HandoffFailed(self._server.origin.url, cause, "give it a larger --ctx-size")
            saved = Saved(name, written.n_written, len(ids), tokens_digest(ids))
            seal = await self._courier.seal(saved)
        except EngineRefused as error:
            raise self._refused("save", error) from error
        except UpstreamError:
            self.discard(name)
            raise
        return Parcel(saved, seal, self._courier.origin.url, now_s() - begun_s)

    async def fetch(self, handoff: Handoff) -> Saved:
        """Have a file brought here, or made here of another engine's. Cancelling it ends it."""
        if handoff.connector == EXAMPLE_FILES:
            return await self._convert(msgspec.json.decode(handoff.attributes, type=ExampleClaim))
        parcel = msgspec.json.decode(handoff.attributes, type=Parcel)
        try:
            await self._courier.pull(parcel)
        except BaseException:
            self.discard(parcel.saved.name)
            raise
        return parcel.saved

    async def _convert(self, claim: ExampleClaim) -> Saved:
        name, layout = new_name(), self.facts.layout
        wish = {
            "name": name,
            "folder": claim.folder,
            "token_ids": claim.token_ids,
            "block_tokens": claim.block_tokens,
            "prompt_tokens": claim.prompt_tokens,
            "kv_type": layout.kv.partition("/")[0] if layout is not None else "f16",
        }
        try:
            made = await self._courier.convert(wish)
        except BaseException:
            self.discard(name)
            raise
        return Saved(name, made.size_bytes, made.tokens, "")

    async def restore(self, lease: Lease, saved: Saved) -> None:
        """Put a file that the courier has confirmed into a slot; the file is deleted then.

        When that fails, or nobody waits for it any more, the lease ends once the server is done.
        """
        restoring = self._background.start(self._restore(lease.slot, saved))
        try:
            await asyncio.shield(restoring)
        except BaseException:
            restoring.add_done_callback(lambda _: lease.give_back())
            raise

    async def _restore(self, slot: int, saved: Saved) -> None:
        try:
            try:
                restored = await self._server.restore(slot, saved.name)
            except EngineRefused:
                await self._make_room()
                restored = await self._server.restore(slot, saved.name)
            found = restored.n_restored, restored.n_read
            if found != (saved.tokens, saved.size_bytes):
                await self._server.erase(slot)
                cause = f"{found[0]} tokens in {found[1]} bytes came instead of what was sent"
                where = self._server.origin.url
                raise HandoffFailed(where, cause, "see who writes to its slot folder")
        except EngineRefused as error:
            raise self._refused("restore", error) from error
        finally:
            self.discard(saved.name)

    async def _make_room(self) -> None:
        """Empty the slots that nobody uses: what they cache fills the pool that all share."""
        idle = self.slots.take_idle()
        try:
            for number in idle.numbers:
                await self._server.erase(number)
            idle.holds(b"")
        finally:
            idle.give_back()

    async def release(self, name: str) -> None:
        """Delete a file that was offered."""
        await self._courier.discard(name)

    def discard(self, name: str) -> None:
        """Delete a file, beside whatever else goes on."""
        self._background.try_to(f"{name} was not deleted", self._courier.discard(name))

    def _refused(self, action: str, error: EngineRefused) -> HandoffFailed:
        said = f"{action}: HTTP {error.status}{quoted_error(error.body)}"
        return HandoffFailed(self._server.origin.url, said, "read the worker's log")
