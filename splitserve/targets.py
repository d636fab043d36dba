"""Did a request meet its targets? One answer for live records and for simulated ones."""

from __future__ import annotations

from splitserve.messages import Slo


def met_targets(
    slo: Slo, *, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
) -> bool:
    """Say whether an answer ended within every target; times are seconds from arrival.

    `e2e_s` None: it did not end normally, which meets no target, not even an absent one. `ttft_s`
    None: it was not streamed, so it has an end but no start. `tpot_s` None: fewer than two tokens.
    """
    if e2e_s is None:
        return False
    late = slo.ttft_s is not None and ttft_s is not None and ttft_s > slo.ttft_s
    slow = slo.tpot_s is not None and tpot_s is not None and tpot_s > slo.tpot_s
    over = slo.deadline_s is not None and e2e_s > slo.deadline_s
    return not (late or slow or over)
