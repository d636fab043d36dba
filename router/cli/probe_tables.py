"""What probing found, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from router.cli.console import table
from splitserve.planning.suggestion import Pair, pairs, suggest_roles

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from router.errors import ProbeFailed
    from router.fleet_probe import Found

_MODELS_SHOWN = 3


def print_fleet(console: Console, found: Sequence[Found]) -> None:
    """Print workers, what is odd about them, and pairs."""
    console.print(_workers(console, found))
    notes = "".join(f"\n{name}: {note}" for name, note in _notes(found))
    if notes:
        console.print(notes, markup=False)
    if len(found) > 1:
        console.print()
        console.print(_pairs(console, found))


def _workers(console: Console, found: Sequence[Found]) -> Table:
    roles = suggest_roles([each.snapshot for each in found])
    rows = table(
        console,
        "worker", "engine", "models", "context", "hand-off", "prefill tok/s", "decode tok/s",
        "round trip ms", "suggested role", right=(3, 5, 6, 7),
    )  # fmt: skip
    for each in found:
        known = each.snapshot
        rows.add_row(
            each.address.name,
            f"{known.engine} {each.version}".strip(),
            _names(known.models),
            f"{known.max_context_tokens}" if known.max_context_tokens else "-",
            known.connector or "no",
            _rate(known.prefill_tok_s),
            _rate(known.decode_tok_s),
            f"{1e3 * each.round_trip_s:.1f}",
            roles[each.address.name].value,
        )
    return rows


def _pairs(console: Console, found: Sequence[Found]) -> Table:
    rows = table(console, "prefill", "decode", "can hand off", title="Pairs")
    for each in pairs([one.snapshot for one in found]):
        rows.add_row(each.prefill, each.decode, each.why_not or "yes")
    return rows


def _notes(found: Sequence[Found]) -> Iterator[tuple[str, str]]:
    for each in found:
        for note in _notes_of(each):
            yield each.address.name, note


def _notes_of(found: Found) -> list[str]:
    """Return what the columns do not show."""
    shown = (f"version {found.version}", found.why_no_handoff)
    notes = [note for note in found.snapshot.notes if note not in shown]
    if found.why_no_handoff:
        notes.append(f"no hand-off: {found.why_no_handoff}")
    if found.why_no_speeds:
        notes.append(f"speed not measured: {found.why_no_speeds}")
    return notes


def _names(models: Sequence[str]) -> str:
    more = len(models) - _MODELS_SHOWN
    return ", ".join(models[:_MODELS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _rate(tokens_per_s: float) -> str:
    if not tokens_per_s:
        return "-"
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"


def document(
    found: Sequence[Found], failed: Sequence[ProbeFailed], written: Path | None
) -> dict[str, Any]:
    """Return what `--json` prints."""
    snapshots = [each.snapshot for each in found]
    roles = suggest_roles(snapshots)
    return {
        "workers": [_worker(each) | {"role": roles[each.address.name].value} for each in found],
        "pairs": [_pair(each) for each in pairs(snapshots)],
        "failed": [{"url": each.url, "error": str(each)} for each in failed],
        "written": None if written is None else str(written),
    }


def _worker(found: Found) -> dict[str, Any]:
    known = found.snapshot
    courier = found.address.options.courier
    return {
        "name": found.address.name,
        "url": found.address.origin.url,
        "engine": known.engine,
        "version": found.version or None,
        "models": list(known.models),
        "context_tokens": known.max_context_tokens or None,
        "max_running": known.max_running,
        "kv_capacity_tokens": known.kv_capacity_tokens or None,
        "connector": known.connector or None,
        "takes": list(known.takes),
        "why_no_handoff": found.why_no_handoff or None,
        "pairing_key": known.pairing_key or None,
        "courier": None if courier is None else courier.url,
        "prefill_tok_s": known.prefill_tok_s or None,
        "decode_tok_s": known.decode_tok_s or None,
        "round_trip_ms": 1e3 * found.round_trip_s,
        "fixed_ms": None if found.speeds is None else 1e3 * found.speeds.round_trip_s,
        "why_no_speeds": found.why_no_speeds or None,
        "notes": list(known.notes),
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "prefill": pair.prefill,
        "decode": pair.decode,
        "can_hand_off": not pair.why_not,
        "why_not": pair.why_not or None,
    }
