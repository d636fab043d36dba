"""What finished hand-offs tell of the pairs that made them."""

from __future__ import annotations

from router.backends.base import BackendCall
from router.reuse import ReuseWatch
from router.shadow import ShadowChecker, Transcript
from router.usage import UsageMeter
from splitserve.messages import Handoff


class PairWatch:
    """Sees every answer that was decoded elsewhere than it was prefilled."""

    def __init__(self, reuse: ReuseWatch, shadow: ShadowChecker) -> None:
        self._reuse = reuse
        self._shadow = shadow

    def meter(
        self, call: BackendCall, handoff: Handoff, decode_worker: str, *, stream: bool
    ) -> UsageMeter:
        """Return what is to see the answer's bytes."""
        prefill = handoff.worker_id
        kept = self._shadow.transcript(call, prefill, decode_worker, stream=stream)
        return kept or UsageMeter(stream=stream)

    def answered(
        self,
        call: BackendCall,
        handoff: Handoff,
        decode_worker: str,
        meter: UsageMeter,
        recomputed_tokens: int | None,
    ) -> None:
        """The answer is complete; never waits. One that was computed again proves no hand-off."""
        prefill = handoff.worker_id
        self._reuse.saw(prefill, decode_worker, recomputed_tokens)
        if isinstance(meter, Transcript) and not recomputed_tokens:
            self._shadow.offer(meter, call, prefill, decode_worker)

    async def stop(self) -> None:
        """End what runs in the background."""
        await self._shadow.stop()
