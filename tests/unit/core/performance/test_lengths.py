"""Output lengths: quantiles against a sorted reference, and who falls back to whom."""

from __future__ import annotations

from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from splitserve.messages import GenerateRequest
from splitserve.performance.lengths import LengthRing, Lengths


def ask(name: str = "r", **more: object) -> GenerateRequest:
    return GenerateRequest(name, "m", 100, **more)  # type: ignore[arg-type]


@given(
    outputs=st.lists(st.integers(1, 60), max_size=900),
    quantile=st.sampled_from([0.0, 0.2, 0.5, 0.8, 0.99]),
    so_far=st.integers(0, 70),
)
def test_a_ring_is_the_sorted_tail(outputs: list[int], quantile: float, so_far: int) -> None:
    ring = LengthRing()
    for tokens in outputs:
        ring.see(tokens)
    kept = outputs[-400:]
    longer = sorted(tokens - so_far for tokens in kept if tokens > so_far)
    if len(kept) < 20:
        expected = 10
    elif not longer:
        expected = 1
    else:
        expected = longer[min(len(longer) - 1, int(quantile * len(longer)))]
    assert ring.left(quantile, so_far) == expected
    assert ring.enough == (len(kept) >= 20)
    assert ring.mean == (fmean(kept) if kept else 200.0)


def test_quantiles_are_of_what_is_left_given_what_was_said() -> None:
    ring = LengthRing()
    for tokens in range(1, 101):
        ring.see(tokens)
    assert ring.left(0.2, 0) == 21
    assert ring.left(0.8, 0) == 81
    assert ring.left(0.2, 50) == 11  # 51 to 100 are left: the eleventh of them, less 50
    assert ring.left(0.8, 99) == 1
    assert ring.left(0.8, 500) == 1


def test_a_new_tenant_falls_back_to_its_class_and_then_to_nothing_known() -> None:
    lengths = Lengths()
    for _ in range(30):
        lengths.see(ask(tenant="a", service_class="code"), 28)
    assert lengths.left(ask(tenant="a", service_class="code"), 0.5, 0) == 28
    assert lengths.left(ask(tenant="b", service_class="code"), 0.5, 0) == 28
    assert lengths.mean(ask(tenant="b", service_class="code")) == 28
    assert lengths.left(ask(tenant="b", service_class="chat"), 0.5, 0) == 10
    assert lengths.mean(ask(tenant="b", service_class="chat")) == 200


def test_a_tenant_with_enough_of_its_own_is_told_its_own() -> None:
    lengths = Lengths()
    for number in range(60):
        lengths.see(ask(tenant="a"), 10)
        if number < 19:
            lengths.see(ask(tenant="b"), 300)
    assert lengths.left(ask(tenant="b"), 0.0, 0) == 10, "19 are too few: the class"
    lengths.see(ask(tenant="b"), 300)
    assert lengths.left(ask(tenant="b"), 0.0, 0) == 300


def test_nobody_is_expected_to_say_more_than_he_may() -> None:
    lengths = Lengths()
    for _ in range(30):
        lengths.see(ask(max_tokens=50), 48)
    assert lengths.left(ask(max_tokens=40), 0.5, 0) == 40
    assert lengths.left(ask(max_tokens=40), 0.5, 35) == 5
    assert lengths.left(ask(max_tokens=40), 0.5, 90) == 1
    assert lengths.mean(ask(max_tokens=40)) == 40


def test_an_oracle_knows() -> None:
    lengths = Lengths({"r": 77}.__getitem__)
    assert lengths.left(ask(), 0.2, 70) == lengths.left(ask(), 0.8, 70) == 7
    assert lengths.left(ask(), 0.2, 77) == 1
    assert lengths.mean(ask()) == 77
