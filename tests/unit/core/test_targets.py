"""Targets are met or missed by one rule."""

from __future__ import annotations

import pytest

from splitserve.messages import Slo
from splitserve.targets import met_targets

ALL = Slo(ttft_s=1.0, tpot_s=0.1, deadline_s=5.0)


@pytest.mark.parametrize(
    "slo,ttft_s,tpot_s,e2e_s,met",
    [
        (ALL, 1.0, 0.1, 5.0, True),
        (ALL, 1.1, 0.1, 5.0, False),
        (ALL, 1.0, 0.11, 5.0, False),
        (ALL, 1.0, 0.1, 5.1, False),
        (ALL, None, 0.1, 5.0, True),  # not streamed
        (ALL, 1.0, None, 5.0, True),  # one token
        (ALL, 1.0, 0.1, None, False),  # did not end
        (Slo(), 99.0, 99.0, 99.0, True),
        (Slo(), None, None, None, False),
    ],
)
def test_targets(
    slo: Slo, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None, met: bool
) -> None:
    assert met_targets(slo, ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s) is met
