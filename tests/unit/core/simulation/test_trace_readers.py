"""Trace formats, and what is said of broken lines."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve.simulation.readers import (
    MOONCAKE_STEP_S,
    TraceError,
    read_agentic,
    read_lengths,
    read_mooncake,
    read_recorded,
    read_trace,
)

Write = Callable[[str], Path]

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
SERVEGEN = "t_s,input_tokens,output_tokens,reason_ratio\n0.0,823,1840,0.9\n1.5,385,0,0.7\n"
AIBRIX = "timestamp_ms,prompt_tokens,output_tokens\n6011,178,8\n6917,258,40\n"
MOONCAKE = """{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [1, 2, 3]}
{"timestamp": 3000, "input_length": 9, "output_length": 7, "hash_ids": [4]}
"""
AGENTIC = """
{"session_id": "a", "timestamp": 0, "input_length": 1200, "output_length": 100, "hash_ids": [7, 8]}
{"session_id": "b", "timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [7, 8]}
{"session_id": "a", "delay": 2500.0, "input_length": 300, "output_length": 10, "hash_ids": [11]}
""".lstrip()
BENCH = """
{"input_toks": 9, "output_toks": 5, "queued_ts": 7, "first_token_ts": 8, "last_token_ts": 10}
{"input_toks": 20, "output_toks": 1, "queued_ts": 6, "first_token_ts": 6.5, "last_token_ts": 6.5}
""".lstrip()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def put(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text)
        return path

    return put


@pytest.mark.parametrize(
    "text,expected",
    [
        (AZURE, [(0.0, 374, 44), (4.314579, 396, 109)]),
        (SERVEGEN, [(0.0, 823, 1840), (1.5, 385, 1)]),
        (AIBRIX, [(6.011, 178, 8), (6.917, 258, 40)]),
        (BENCH, [(1.0, 9, 5), (0.0, 20, 1)]),
    ],
)
def test_the_format_is_told_from_the_file(
    text: str, expected: list[tuple[float, int, int]], write: Write
) -> None:
    found = read_trace(write(text))
    assert [(r.prompt_tokens, r.output_tokens) for r in found] == [e[1:] for e in expected]
    assert [r.at_s for r in found] == pytest.approx([e[0] for e in expected])


def test_mooncake_groups_are_spread_over_their_three_seconds(write: Write) -> None:
    path = write(MOONCAKE)
    assert [r.at_s for r in read_mooncake(path)] == [0.0, 0.0, 3.0]
    spread = read_mooncake(path, random.Random(1))
    assert spread == read_mooncake(path, random.Random(1)), "same seed, same times"
    assert spread != read_mooncake(path, random.Random(2))
    at_s = [r.at_s for r in spread]
    assert at_s == sorted(at_s)
    assert len(set(at_s)) == 3
    assert 0 <= at_s[0] < at_s[1] < MOONCAKE_STEP_S <= at_s[2] < 2 * MOONCAKE_STEP_S
    assert sorted(r.block_hashes for r in spread) == [(1, 2), (1, 2, 3), (4,)]


def test_mooncake_times_that_are_not_rounded_stay(write: Write) -> None:
    path = write(MOONCAKE.replace("3000", "3040"))
    assert [r.at_s for r in read_mooncake(path, random.Random(1))] == [0.0, 0.0, 3.04]


def test_a_later_turn_has_everything_before_it_in_its_prompt(write: Write) -> None:
    first, other, second = read_agentic(write(AGENTIC))
    assert (first.prompt_tokens, second.prompt_tokens) == (1200, 1200 + 100 + 300)
    assert second.after_s == 2.5
    assert first.block_hashes == other.block_hashes == (7, 8), "1,200 tokens are two full blocks"
    assert second.block_hashes[:2] == (7, 8)
    assert len(second.block_hashes) == 3
    assert second.session == first.session != other.session


def test_blocks_of_one_session_are_unknown_to_the_next(write: Write) -> None:
    text = AGENTIC.replace('"input_length": 300', '"input_length": 900')
    more = text + text.splitlines()[2].replace('"a"', '"b"') + "\n"
    *_, mine, theirs = read_agentic(write(more))
    assert mine.block_hashes[:2] == theirs.block_hashes[:2]
    assert mine.block_hashes[2] != theirs.block_hashes[2]


def test_recorded_timings(write: Write) -> None:
    long, short = read_recorded(write(BENCH))
    assert (long.ttft_s, long.tpot_s, long.e2e_s) == (1.0, 0.5, 3.0)
    assert (short.ttft_s, short.tpot_s, short.e2e_s) == (0.5, None, 0.5)


def test_lengths(write: Write) -> None:
    path = write("num_prefill_tokens,num_decode_tokens,num_total_tokens\n3772,54,3826\n9,0,9\n")
    assert read_lengths(path) == [(3772, 54), (9, 1)]


@pytest.mark.parametrize(
    "text,said",
    [
        (AZURE.replace("374", "many"), "line 2: invalid literal"),
        (AZURE.replace("2023-11-16 18:15:50", "later"), "line 3: Invalid isoformat"),
        (AZURE + "2023-11-16 18:15:51.0\n", "line 4: int() argument"),
        (AIBRIX.replace("timestamp_ms", "timestamp_ms,x").replace("prompt_tokens", "p"), "line 2"),
        (MOONCAKE.replace('"output_length": 6', '"out": 6'), "line 2: output_length is missing"),
        (MOONCAKE + "{cut", "line 4: Expecting property name"),
        (MOONCAKE + "[1]\n", "line 4: list indices"),
        (MOONCAKE.replace("[4]", "4"), "line 3: 'int' object is not iterable"),
        ("when,what\n1,2\n", "line 1: no known trace format; known are azure, servegen"),
        (AZURE.splitlines()[0], "the trace is empty"),
        ("", "line 1: no known trace format"),
    ],
)
def test_broken_lines_are_named(text: str, said: str, write: Write) -> None:
    path = write(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}")
    assert said in str(caught.value)


def test_a_missing_and_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: there is no such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)
    binary = tmp_path / "x"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(binary)
    with pytest.raises(TraceError, match="format 'vllm' is unknown; use azure, servegen"):
        read_trace(binary, "vllm")
