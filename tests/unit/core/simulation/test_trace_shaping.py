"""Windows, rates and limits of traces."""

from __future__ import annotations

import random

import pytest

from splitserve.messages import Slo
from splitserve.simulation.trace import TraceRequest, bounded, scale_rate, window


def every_second(count: int) -> list[TraceRequest]:
    return [TraceRequest(float(n), 100 + n, 10) for n in range(count)]


def session(name: str, turns: int) -> list[TraceRequest]:
    return [TraceRequest(0.0, 100 * (n + 1), 10, session=name, after_s=1.0) for n in range(turns)]


def test_a_window_counts_from_its_start() -> None:
    found = window(every_second(100), 10, 13)
    assert [(r.at_s, r.prompt_tokens) for r in found] == [(0.0, 110), (1.0, 111), (2.0, 112)]


def test_a_window_takes_sessions_whole() -> None:
    late = [TraceRequest(50.0, 1, 1, session="late"), TraceRequest(0.0, 2, 1, session="late")]
    found = window([*session("early", 3), *late], 0, 10)
    assert [r.session for r in found] == ["early"] * 3


@pytest.mark.parametrize("rate", [0.3, 0.8, 1.0, 1.3, 2.5])
def test_rates(rate: float) -> None:
    requests = every_second(4000)
    scaled = scale_rate(requests, rate, random.Random(3))
    assert len(scaled) == pytest.approx(rate * len(requests), rel=0.05)
    assert [r.at_s for r in scaled] == sorted(r.at_s for r in scaled)
    assert scaled == scale_rate(requests, rate, random.Random(3)), "same seed, same trace"
    by_prompt = {r.prompt_tokens: r.at_s for r in requests}
    for request in scaled:
        assert 0 <= request.at_s - by_prompt[request.prompt_tokens] <= 2.0, "time is not squeezed"


def test_thinning_and_repeating_keep_sessions_whole() -> None:
    requests = [r for n in range(200) for r in session(f"s{n}", 4)]
    for rate in (0.5, 2.5):
        scaled = scale_rate(requests, rate, random.Random(1))
        turns: dict[str, list[int]] = {}
        for request in scaled:
            turns.setdefault(request.session, []).append(request.prompt_tokens)
        assert set(map(tuple, turns.values())) == {(100, 200, 300, 400)}
        assert len(turns) == pytest.approx(200 * rate, rel=0.2)


def test_lengths_are_cut_and_the_limit_is_named() -> None:
    (cut,) = bounded([TraceRequest(0.0, 9000, 2000)], 7000, 1000)
    assert (cut.prompt_tokens, cut.output_tokens, cut.max_tokens) == (7000, 1000, 1000)


def test_blocks_are_cut_with_the_prompt() -> None:
    (cut,) = bounded([TraceRequest(0.0, 2048, 5, block_hashes=(1, 2, 3, 4))], 1025, 10)
    assert cut.block_hashes == (1, 2, 3)


def test_what_a_router_is_asked() -> None:
    trace = TraceRequest(1.0, 20, 5, "chat", Slo(1.0, 0.05), (1,), "s", "alice", max_tokens=7)
    request = trace.request("r1", "m")
    assert (request.request_id, request.model, request.prompt_tokens) == ("r1", "m", 20)
    assert (request.max_tokens, request.tenant, request.session) == (7, "alice", "s")
    assert not trace.batch
    assert TraceRequest(1.0, 20, 5, "batch", Slo(deadline_s=86400.0)).batch
