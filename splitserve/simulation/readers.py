"""Readers of trace files, each named by who publishes its format.

Every reader raises TraceError, which names the file, the line and the cause.
"""

from __future__ import annotations

import csv
import datetime
import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from splitserve.simulation.job import HASH_BLOCK_TOKENS
from splitserve.simulation.trace import TraceRequest

MOONCAKE_STEP_S = 3.0  # its conversation trace has times rounded to this

T = TypeVar("T")
Row = Mapping[str, Any]


class TraceError(ValueError):
    """A trace that cannot be read: names the file, the line and the cause."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request that a real engine served, and how: seconds. TPOT is None below two tokens."""

    request: TraceRequest
    ttft_s: float
    tpot_s: float | None
    e2e_s: float


def read_trace(path: Path, kind: str = "", seed: int = 0) -> list[TraceRequest]:
    """Read a trace; `kind` is one of KINDS, or "" to tell it from the file's first line.

    `seed` is for formats whose times are rounded and are spread again.
    """
    kind = kind or sniff(path)
    if kind not in KINDS:
        raise TraceError(f"{path}: trace format {kind!r} is unknown; use {', '.join(KINDS)}")
    found = KINDS[kind](path, random.Random(seed))
    if not found:
        raise TraceError(f"{path}: the trace is empty")
    return found


def sniff(path: Path) -> str:
    """Tell the format from the first line."""
    line = next(iter(_lines(path)), "")
    for mark, kind in _MARKS.items():
        if mark in line:
            return kind
    raise TraceError(f"{path} line 1: no known trace format; known are {', '.join(KINDS)}")


# --- tables ---------------------------------------------------------------------------------------


def read_azure(path: Path, _: random.Random | None = None) -> list[TraceRequest]:
    """Azure LLM inference traces (CC-BY-4.0): TIMESTAMP, ContextTokens, GeneratedTokens."""

    def parse(row: Row) -> tuple[datetime.datetime, TraceRequest]:
        # Its 100-ns digits are more than datetime takes.
        at = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
        return at, _sized(0.0, row["ContextTokens"], row["GeneratedTokens"])

    rows = _table(path, parse)
    return [replace(r, at_s=(at - rows[0][0]).total_seconds()) for at, r in rows]


def read_servegen(path: Path, _: random.Random | None = None) -> list[TraceRequest]:
    """A sample drawn with ServeGen (Apache-2.0): t_s, input_tokens, output_tokens."""

    def parse(row: Row) -> TraceRequest:
        return _sized(float(row["t_s"]), row["input_tokens"], row["output_tokens"])

    return _table(path, parse)


def read_aibrix(path: Path, _: random.Random | None = None) -> list[TraceRequest]:
    """AIBrix workloads (Apache-2.0) as lengths: timestamp_ms, prompt_tokens, output_tokens."""

    def parse(row: Row) -> TraceRequest:
        return _sized(float(row["timestamp_ms"]) / 1e3, row["prompt_tokens"], row["output_tokens"])

    return _table(path, parse)


def read_lengths(path: Path) -> list[tuple[int, int]]:
    """Prompt and output lengths without times, as Vidur publishes them (MIT), for batch jobs."""

    def parse(row: Row) -> tuple[int, int]:
        return int(row["num_prefill_tokens"]), max(1, int(row["num_decode_tokens"]))

    return _table(path, parse)


# --- lines of JSON --------------------------------------------------------------------------------


def read_mooncake(path: Path, draw: random.Random | None = None) -> list[TraceRequest]:
    """Mooncake traces (Apache-2.0): timestamp in ms, lengths, hashes of 512-token blocks.

    Where all times are rounded to 3 s, as in its conversation trace, each group is spread
    uniformly over its 3 s; without `draw` the times stay as they are.
    """

    def parse(row: Row) -> TraceRequest:
        sized = _sized(row["timestamp"] / 1e3, row["input_length"], row["output_length"])
        return replace(sized, block_hashes=tuple(row["hash_ids"]))

    found = _json_lines(path, parse)
    if draw is None or any(r.at_s % MOONCAKE_STEP_S for r in found):
        return found
    spread = [replace(r, at_s=r.at_s + draw.uniform(0.0, MOONCAKE_STEP_S)) for r in found]
    return sorted(spread, key=lambda r: r.at_s)


def read_agentic(path: Path, _: random.Random | None = None) -> list[TraceRequest]:
    """Coding-agent sessions as aiperf synthesises them: closed chains of turns.

    From the second turn on a line tells only the new tokens: the prompt is everything before (all
    prompts and all answers of the session) plus these. Blocks beyond the first prompt are known to
    nobody else, so they get numbers of the session's own.
    """
    sessions: dict[str, tuple[int, tuple[int, ...], int]] = {}

    def parse(row: Row) -> TraceRequest:
        name = row["session_id"]
        number, blocks, before = sessions.get(name, (len(sessions), (), 0))
        tokens = before + int(row["input_length"])
        if not before:
            blocks = tuple(row["hash_ids"])[: tokens // HASH_BLOCK_TOKENS]
        own = range(len(blocks), tokens // HASH_BLOCK_TOKENS)
        blocks = (*blocks, *(-1 - (number << 20 | block) for block in own))
        output_tokens = int(row["output_length"])
        sessions[name] = (number, blocks, tokens + output_tokens)
        at_s, after_s = row.get("timestamp", 0.0) / 1e3, row.get("delay", 0.0) / 1e3
        sized = _sized(at_s, tokens, output_tokens)
        return replace(sized, block_hashes=blocks, session=name, after_s=after_s)

    return _json_lines(path, parse)


def read_recorded(path: Path) -> list[Recorded]:
    """Requests of a real vLLM run, as LLMServingSim publishes them (MIT), with its timings."""

    def parse(row: Row) -> tuple[float, Recorded]:
        queued_s, first_s, last_s = row["queued_ts"], row["first_token_ts"], row["last_token_ts"]
        request = _sized(0.0, row["input_toks"], row["output_toks"])
        gaps = request.output_tokens - 1
        tpot_s = (last_s - first_s) / gaps if gaps else None
        return queued_s, Recorded(request, first_s - queued_s, tpot_s, last_s - queued_s)

    rows = _json_lines(path, parse)
    start_s = min((queued_s for queued_s, _ in rows), default=0.0)
    return [
        replace(recorded, request=replace(recorded.request, at_s=queued_s - start_s))
        for queued_s, recorded in rows
    ]


def _read_bench(path: Path, _: random.Random | None = None) -> list[TraceRequest]:
    return [recorded.request for recorded in read_recorded(path)]


# --- lines ----------------------------------------------------------------------------------------


def _sized(at_s: float, prompt_tokens: Any, output_tokens: Any) -> TraceRequest:
    return TraceRequest(at_s, max(1, int(prompt_tokens)), max(1, int(output_tokens)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError as error:
        raise TraceError(f"{path}: there is no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def _table(path: Path, parse: Callable[[Row], T]) -> list[T]:
    return _parsed(path, enumerate(csv.DictReader(_lines(path)), 2), parse)


def _json_lines(path: Path, parse: Callable[[Row], T]) -> list[T]:
    def load(line: str) -> T:
        return parse(json.loads(line))

    return _parsed(path, enumerate(_lines(path), 1), load)


def _parsed(path: Path, rows: Iterable[tuple[int, Any]], parse: Callable[[Any], T]) -> list[T]:
    found: list[T] = []
    for number, row in rows:
        try:
            found.append(parse(row))
        except KeyError as error:
            raise TraceError(f"{path} line {number}: {error.args[0]} is missing") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise TraceError(f"{path} line {number}: {error}") from error
    return found


KINDS: Mapping[str, Callable[[Path, random.Random], list[TraceRequest]]] = {
    "azure": read_azure,
    "servegen": read_servegen,
    "aibrix": read_aibrix,
    "mooncake": read_mooncake,
    "agentic": read_agentic,
    "vllm-bench": _read_bench,
}
# What the first line of each format contains and no other does.
_MARKS = {
    "ContextTokens": "azure",
    "reason_ratio": "servegen",
    "timestamp_ms": "aibrix",
    '"session_id"': "agentic",
    '"hash_ids"': "mooncake",
    '"queued_ts"': "vllm-bench",
}
