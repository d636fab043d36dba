"""May this llama-server take part in hand-offs? Found out by doing one with itself.

Which of its flags are safe no route tells, and whether a restored slot is used again depends on
the model too. So a few tokens go the whole way once: evaluated in one slot, saved, seen by the
courier, restored into another slot, and used from there after another request has begun.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from router.backends.base import EngineRefused, quoted_error
from router.backends.courier_client import CourierClient, Layout, Saved, tokens_digest
from router.backends.llama_server import LlamaServer

_TEXT = "The quick brown fox jumps over the lazy dog near the old stone bridge by the river."
_TOKENS = 8
_LEAST_TOKENS = 4
_NOT_SUPPORTED = 501


class CannotSplit(Exception):
    """The server takes no part in hand-offs. Its text says why, and what to start it with."""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """What the server's own slot file shows. `layout` None: a kind that is not understood."""

    slots: int
    layout: Layout | None
    file_bytes: int
    tokens: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that a token adds to a file."""
        return self.layout.bytes_per_token if self.layout else self.file_bytes // self.tokens

    @property
    def pairing_fields(self) -> dict[str, str]:
        """What must be equal on both sides of a hand-off."""
        if self.layout is None:
            return {"slot_file": f"{self.file_bytes} bytes for {self.tokens} tokens"}
        return {
            "kv": self.layout.kv,
            "v_order": self.layout.v_order,
            "streams": str(self.layout.streams),
            "shape": self.layout.shape,
        }


def new_name() -> str:
    """A name for a slot file, of the only form that couriers take, and that nobody can guess."""
    return f"splitserve-{secrets.token_hex(16)}.slot"


async def check_split(server: LlamaServer, courier: CourierClient, slots: int) -> SlotFacts:
    """Hand a few tokens over within one idle server.

    Raises CannotSplit, HandoffFailed when the courier cannot do its part, and UpstreamError.
    """
    ids = (await server.tokenize(_TEXT))[:_TOKENS]
    if len(ids) < _LEAST_TOKENS:
        raise CannotSplit("its tokenizer makes too few tokens of plain text; its model is no LLM")
    name = new_name()
    try:
        return await _hand_over(server, courier, slots, ids, name)
    except EngineRefused as error:
        if error.status == _NOT_SUPPORTED:
            raise CannotSplit(
                "its slots cannot be saved; start llama-server with --slot-save-path DIR"
            ) from error
        said = f"HTTP {error.status}{quoted_error(error.body)}"
        raise CannotSplit(f"its slots cannot be saved and restored: {said}") from error
    finally:
        await courier.discard(name)


async def _hand_over(
    server: LlamaServer, courier: CourierClient, slots: int, ids: Sequence[int], name: str
) -> SlotFacts:
    source, target = 0, min(1, slots - 1)
    kept = ids[:-1]
    await server.evaluate(kept, source)
    saved = await server.save(source, name)
    seal = await courier.seal(Saved(name, saved.n_written, len(kept), tokens_digest(kept)))
    await server.restore(target, name)
    if source != target:
        await server.evaluate(ids[:1], source)  # an innocent other request
    used = await server.evaluate(ids, target)
    if used.cache_n != len(kept):
        await server.restore(target, name)
        at_once = await server.evaluate(ids, target)
        raise CannotSplit(_why_computed_again(len(kept), at_once.cache_n))
    return SlotFacts(slots, seal.layout, saved.n_written, len(kept))


def _why_computed_again(tokens: int, reused_at_once: int) -> str:
    if reused_at_once == tokens:
        return (
            "an idle slot loses its KV when another request begins; "
            "start llama-server with --no-cache-idle-slots"
        )
    return (
        f"of {tokens} tokens in a restored slot {reused_at_once} were used again; "
        "start llama-server with --swa-full if its model has sliding windows, "
        "other models of this kind run whole"
    )
