"""A prefill worker beside an eight times slower decode box pays, by as much as was foreseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import slow_decode_box
from benchmarks.engines import llama_cpp
from tests.engines.conftest import program

FAR_OFF = 0.2
FAR_OFF_FOR_THE_ROUTER = 0.4  # it also has to learn from what was spoilt, and only a dozen answers


def off_by(result: dict[str, Any], foreseen: str) -> float:
    return abs(float(result["measured"]) / float(result[foreseen]) - 1)


def test_a_split_wins_by_the_predicted_factor(
    model_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else runs on this machine can spoil a run: one that is off is made once more."""
    monkeypatch.setenv(llama_cpp.VARIABLE, str(program("llama-cpp")))
    result = slow_decode_box.run(model_gguf)
    if off_by(result, "predicted") > FAR_OFF:
        result = slow_decode_box.run(model_gguf)
    told = {name: value for name, value in result.items() if name not in ("turns", "warm_up")}
    assert result["measured"] > 2, told
    assert off_by(result, "predicted") <= FAR_OFF, told
    assert off_by(result, "expected_by_router") <= FAR_OFF_FOR_THE_ROUTER, told
    recomputed = {turn["disaggregated"]["recomputed_tokens"] for turn in result["turns"]}
    assert recomputed == {0}
