"""Links: what a transfer is expected to take, and what is learnt from one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.performance.links import ASSUMED_BYTES_S, LATENCY_S, Links

MIB = 1 << 20


def test_an_unmeasured_link_is_priced_as_gigabit_and_said_to_be_unmeasured() -> None:
    links = Links()
    assert not links.measured("p", "d")
    assert links.transfer_s("p", "d", 2 * ASSUMED_BYTES_S) == pytest.approx(LATENCY_S + 2.0)


def test_the_first_transfer_sets_the_rate_and_later_ones_move_it_a_fifth() -> None:
    links = Links()
    link = links.of("p", "d")
    link.see(100 * MIB, 1.0)
    assert link.rate_bytes_s == 100 * MIB
    link.see(200 * MIB, 1.0)
    assert link.rate_bytes_s == pytest.approx(120 * MIB)
    assert links.measured("p", "d")
    assert not links.measured("d", "p"), "the other direction is another link"


def test_a_declared_rate_is_corrected_by_what_is_seen() -> None:
    link = Links().of("p", "d")
    link.rate_bytes_s = 1000.0 * MIB
    for _ in range(30):
        link.see(100 * MIB, 1.0)
    assert link.rate_bytes_s == pytest.approx(100 * MIB, rel=0.02)


def test_small_or_timeless_transfers_tell_nothing() -> None:
    link = Links().of("p", "d")
    link.see(MIB - 1, 0.001)
    link.see(100 * MIB, 0.0)
    assert (link.rate_bytes_s, link.samples) == (0.0, 0)


def test_a_transfer_waits_for_the_busier_end() -> None:
    links = Links()
    for pair in (("p", "d"), ("p", "e"), ("q", "d")):
        links.of(*pair).rate_bytes_s = 1000.0
    links.begin("p", "e", 3000.0)
    links.begin("q", "d", 500.0)
    assert links.transfer_s("p", "d", 1000.0) == pytest.approx(LATENCY_S + 4.0)
    links.end("p", "e", 3000.0)
    assert links.transfer_s("p", "d", 1000.0) == pytest.approx(LATENCY_S + 1.5)


def test_a_worker_that_left_is_forgotten() -> None:
    links = Links()
    for pair in (("p", "d"), ("d", "p"), ("q", "d"), ("p", "q")):
        links.of(*pair).see(10 * MIB, 1.0)
    links.begin("p", "d", 100.0)
    links.forget("p")
    assert set(links.pairs) == {("q", "d")}
    links.end("p", "d", 100.0)
    assert links.leaving_bytes == links.entering_bytes == {}


@given(
    st.lists(
        st.tuples(st.sampled_from("pq"), st.sampled_from("de"), st.floats(1, 1e12)), max_size=40
    )
)
def test_what_began_and_ended_leaves_nothing_queued(moves: list[tuple[str, str, float]]) -> None:
    links = Links()
    for move in moves:
        links.begin(*move)
    for move in reversed(moves):
        links.end(*move)
    queued = sum(links.leaving_bytes.values()) + sum(links.entering_bytes.values())
    assert queued <= 1e-3 * (1 + sum(size for _, _, size in moves) / 1e9)
