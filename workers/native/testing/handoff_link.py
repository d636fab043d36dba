"""Two KV pools and a hand-off port between them, without a model."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import torch

from workers.native.handoff.errors import HandoffError
from workers.native.handoff.offers import Offer, OfferTable
from workers.native.handoff.pull import Pull, Pulled, end_of
from workers.native.handoff.reference import HandoffReference, hash_prompt
from workers.native.handoff.server import HandoffServer
from workers.native.kv.layout import KvLayout
from workers.native.kv.pool import KvPool

PAIRING = "weights=m;layout=x"
VOCABULARY = 50
_WAIT_S = 20.0


class Running:
    """A pull on its own thread."""

    def __init__(self, pull: Pull) -> None:
        self.pull = pull
        self._end: Pulled | HandoffError | None = None
        self._thread = threading.Thread(target=self._run, name="handoff-pull")
        self._thread.start()

    def _run(self) -> None:
        self._end = end_of(self.pull)
        self.pull.close()

    def end(self) -> Pulled | HandoffError:
        """Wait for it."""
        self._thread.join(_WAIT_S)
        assert self._end is not None, "the pull is still running"
        return self._end

    def failure(self) -> HandoffError:
        """Wait for it; it must fail."""
        end = self.end()
        assert isinstance(end, HandoffError), f"it succeeded: {end}"
        return end

    def result(self) -> Pulled:
        """Wait for it; it must succeed."""
        end = self.end()
        assert isinstance(end, Pulled), f"it failed: {end}"
        return end


class HandoffLink:
    """A prefill worker's pool, offers and port, and a decode worker's pool."""

    def __init__(self, *, blocks: int = 6, head_dim: int = 8, host: str = "127.0.0.1") -> None:
        layout = KvLayout(2, 2, head_dim, torch.float32, 4)
        self.host = host
        self.prefill = KvPool(layout, blocks, torch.device("cpu"))
        self.prefill.tensor.copy_(torch.randn(self.prefill.tensor.shape))
        self.decode = KvPool(layout, blocks, torch.device("cpu"))
        self.now_s = 0.0
        self.offers = OfferTable(30.0, lambda: self.now_s)
        self.server = HandoffServer(self.offers, self.prefill, PAIRING, host)
        self.ends: list[str] = []
        self.ended = threading.Event()
        self.raw_logits = torch.randn(VOCABULARY).numpy().tobytes()

    def close(self) -> None:
        """Stop the port and give the memory back."""
        self.server.stop()
        self.prefill.close()
        self.decode.close()
        del self.server, self.prefill, self.decode  # a mapping lives as long as its tensor

    def offer(self, prompt_tokens: int = 15) -> Offer:
        """Open an offer. Its end is noted in `ends`."""

        def on_end(offer: Offer, reason: str) -> None:
            assert not offer.reading, "ended while somebody reads"
            self.ends.append(reason)
            self.ended.set()

        return self.offers.make(hash_prompt(range(prompt_tokens)), prompt_tokens, on_end)

    def finish(self, offer: Offer) -> None:
        """Prefill is done: publish what is missing, and the logits."""
        width = self.prefill.layout.blocks_for(offer.prompt_tokens)
        offer.publish(list(range(len(offer.blocks), width)))
        offer.finish(memoryview(self.raw_logits))

    def pull(self, offer: Offer, *, start: int | None = 0, **changes: Any) -> Pull:
        """A pull of `offer` into the decode pool, backwards; with `start` None it gets no room."""
        reference = HandoffReference(offer.offer_id, offer.key, self.host, self.server.port)
        return self.pull_from(reference, offer.prompt_tokens, start=start, **changes)

    def pull_from(
        self, reference: HandoffReference, prompt_tokens: int = 15, *, start: int | None = 0,
        **changes: Any,
    ) -> Pull:  # fmt: skip
        """As `pull`, from any address. `changes` replace fields of the pull."""
        pull = Pull(
            reference,
            hash_prompt(range(prompt_tokens)),
            prompt_tokens,
            self.decode,
            PAIRING,
            4 * VOCABULARY,
            time.perf_counter,
            timeout_s=5.0,
        )
        pull = replace(pull, **changes)
        if start is not None:
            pull.begin(self.targets(prompt_tokens)[start:], start)
        return pull

    def targets(self, prompt_tokens: int = 15) -> list[int]:
        """The decode pool's blocks for a prompt."""
        return list(range(self.decode.layout.blocks_for(prompt_tokens)))[::-1]

    def arrived(self, number: int, prompt_tokens: int = 15) -> bool:
        """Whether block `number` of the prompt is in the decode pool."""
        target = self.targets(prompt_tokens)[number]
        return torch.equal(self.decode.tensor[target], self.prefill.tensor[number])
