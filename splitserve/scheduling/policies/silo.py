"""A silo: one worker is kept for batch, the others never see any."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest, Role
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import is_batch
from splitserve.scheduling.policies.lmetric import LMetric


class Silo(LMetric):
    """Batch on the worker with the highest id, the rest by LMetric on the other workers.

    Where there is no other worker, everything shares the one.
    """

    def line(self, request: GenerateRequest) -> str:
        """Batch that waits for its worker holds nobody else up."""
        return f"{request.model} {is_batch(request)}"

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the best candidate on this band's side, or None to wait."""
        serving = [a for a in desk.ledger.serving(request.model) if not a.snapshot.draining]
        decoders = [a for a in serving if a.snapshot.role is not Role.PREFILL]
        if len(decoders) > 1 and request.forced_worker is None:
            kept = max(a.worker_id for a in decoders)
            candidates = [c for c in candidates if (c.decode_worker == kept) == is_batch(request)]
        return super().choose(request, candidates, desk) if candidates else None
