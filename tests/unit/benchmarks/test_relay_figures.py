"""Shapes of the relay measurement and what becomes of its samples."""

import json

import pytest

from benchmarks.relay import SHAPES, System, _figures


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_bodies_have_the_size_and_differ_and_repeat_by_seed(shape: object) -> None:
    assert isinstance(shape, type(SHAPES[0]))
    bodies = shape.bodies(7, 20)
    assert len(set(bodies)) == 20
    assert bodies == shape.bodies(7, 20)
    assert bodies != shape.bodies(8, 20)
    size_bytes = 2048 if shape.prompt_bytes < 10_000 else 65_536
    assert all(abs(len(body) - size_bytes) < 0.03 * size_bytes for body in bodies)
    assert json.loads(bodies[0])["stream"] is shape.stream


def test_added_latency_is_against_the_direct_median() -> None:
    direct, ours = System("direct", "", None), System("splitserve", "", None)
    direct.first_chunk_ms = [1.0] * 99 + [3.0]
    ours.first_chunk_ms = [1.5] * 50 + [9.5] * 50
    figures = _figures([direct, ours])
    assert figures["direct"]["added_ms"]["p50"] == 0
    assert figures["splitserve"]["added_ms"]["p50"] == pytest.approx(4.5)
    assert figures["splitserve"]["added_ms"]["p99"] == pytest.approx(8.5)
