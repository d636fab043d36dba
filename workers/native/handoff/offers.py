"""Offers: KV that a prefill worker holds for one decode worker, under a lease.

An offer is made before its prefill starts and filled block by block. It ends exactly once: read,
released, refused, expired, or with its peer. Only when no thread touches its blocks any more is
`on_end` called, and only then may the engine use them for another prompt.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.native.handoff.errors import HandoffRefused


@dataclass(eq=False, slots=True)
class Offer:
    """One hand-off on the prefill side. Fields are guarded by `changed`."""

    offer_id: str
    key: str
    prompt_hash: str
    prompt_tokens: int
    expires_s: float
    on_end: Callable[[Offer, str], None]
    blocks: list[int] = field(default_factory=list)
    logits: memoryview | None = None
    failure: str = ""
    ended: str = ""
    reading: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def publish(self, blocks: list[int]) -> None:
        """More blocks, in prompt order, are computed and will not change."""
        with self.changed:
            self.blocks.extend(blocks)
            self.changed.notify_all()

    def finish(self, logits: memoryview) -> None:
        """All blocks are published; `logits` are those of the last prompt token."""
        with self.changed:
            self.logits = logits
            self.changed.notify_all()

    def fail(self, reason: str) -> None:
        """Prefill will not finish; whoever reads is told why."""
        with self.changed:
            self.failure = self.failure or reason
            self.changed.notify_all()
            idle = not self.reading
        if idle:
            self.end(reason)

    def end(self, reason: str) -> None:
        """End the offer; the first reason stays. Calls `on_end` now or when its reader leaves."""
        with self.changed:
            if self.ended:
                return
            self.ended = reason
            self.changed.notify_all()
            idle = not self.reading
        if idle:
            self.on_end(self, reason)

    def stop_reading(self, reason: str) -> None:
        """The reader is gone, for `reason`; the offer ends with it."""
        with self.changed:
            self.reading = False
            self.ended = self.ended or self.failure or reason
            ended = self.ended
        self.on_end(self, ended)

    def wait_for(self, block: int, timeout_s: float) -> bool:
        """Wait until block number `block` is there, or logits, failure or end. False: none yet."""

        def news() -> bool:
            done = self.logits is not None or self.failure or self.ended
            return bool(len(self.blocks) > block or done)

        with self.changed:
            return self.changed.wait_for(news, timeout_s)


class OfferTable:
    """All offers of one worker, by id. Thread-safe. Ended offers leave the table at once."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._offers: dict[str, Offer] = {}
        self._lock = threading.Lock()
        self.ended: dict[str, int] = {}

    @property
    def live(self) -> int:
        """Offers that hold KV or will."""
        return len(self._offers)

    def make(
        self, prompt_hash: str, prompt_tokens: int, on_end: Callable[[Offer, str], None]
    ) -> Offer:
        """Open an offer; its lease runs until a decode worker claims it."""

        def ended(offer: Offer, reason: str) -> None:
            with self._lock:
                self._offers.pop(offer.offer_id, None)
                kind = reason.partition(":")[0]
                self.ended[kind] = self.ended.get(kind, 0) + 1
            on_end(offer, reason)

        offer = Offer(
            secrets.token_hex(12),
            secrets.token_hex(16),
            prompt_hash,
            prompt_tokens,
            self._clock() + self._lease_s,
            ended,
        )
        with self._lock:
            self._offers[offer.offer_id] = offer
        return offer

    def claim(self, offer_id: str, key: str, prompt_hash: str) -> Offer:
        """Give an offer to its one reader. Raises HandoffRefused with the reason."""
        with self._lock:
            offer = self._offers.get(offer_id)
        given = key.encode("utf-8", "replace")
        if offer is None or not hmac.compare_digest(offer.key.encode(), given):
            raise HandoffRefused(
                f"no offer {offer_id[:24]!r}: it was read, released, or its lease of "
                f"{self._lease_s:g} s ran out; prefill again"
            )
        if offer.prompt_hash != prompt_hash:
            raise HandoffRefused("the KV offered belongs to another prompt; check tokenizers")
        with offer.changed:
            if offer.reading or offer.ended:
                raise HandoffRefused(f"offer {offer_id} is taken; one offer serves one reader")
            offer.reading = True
        return offer

    def release(self, offer_id: str) -> bool:
        """End an offer that nobody needs any more; False when it had ended before."""
        with self._lock:
            offer = self._offers.get(offer_id)
        if offer is None:
            return False
        offer.end("released")
        return True

    def expire(self) -> int:
        """End offers whose lease ran out before anybody came; returns how many."""
        now_s = self._clock()
        with self._lock:
            late = [o for o in self._offers.values() if now_s >= o.expires_s and not o.reading]
        for offer in late:
            offer.end("expired")
        return len(late)

    def end_all(self, reason: str) -> None:
        """End every offer, at shutdown."""
        with self._lock:
            offers = list(self._offers.values())
        for offer in offers:
            offer.end(reason)
