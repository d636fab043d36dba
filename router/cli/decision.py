"""A decision record as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from router.cli.console import table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Record = Mapping[str, Any]


def outcome_table(console: Console, record: Record) -> Table:
    """What was predicted for the chosen plan, and what happened, in milliseconds."""
    chosen: Record = record.get("chosen") or {}
    actual: Record = record.get("actual") or {}
    workers: Mapping[str, str] = chosen.get("workers") or {}
    rows = table(
        console,
        "step",
        "worker",
        "predicted ms",
        "actual ms",
        right=(2, 3),
        title="Decision: predicted and actual",
    )
    waited = ms(record.get("released_ms"))
    rows.add_row("wait for a worker", "router", "", waited)
    prefill = workers.get("prefill") or workers.get("aggregated") or "nobody"
    rows.add_row("prefill", prefill, "", ms(actual.get("prefill_ms")))
    if "prefill" in workers:
        pair = f"{workers['prefill']} -> {workers['decode']}"
        transfer = ms(chosen.get("transfer_ms"))
        rows.add_row(f"KV hand-off{_moved(actual)}", pair, transfer, ms(actual.get("transfer_ms")))
    rows.add_row(
        "first token, TTFT", "", ms(chosen.get("predicted_ttft_ms")), ms(actual.get("ttft_ms"))
    )
    decode = workers.get("decode") or workers.get("aggregated") or "nobody"
    tpot = ms(chosen.get("predicted_tpot_ms"))
    rows.add_row("decode, per token, TPOT", decode, tpot, ms(actual.get("tpot_ms")))
    return rows


def _moved(actual: Record) -> str:
    moved_bytes, again = actual.get("transfer_bytes"), actual.get("recomputed_tokens")
    moved = f", {moved_bytes / 1e6:.2f} MB" if moved_bytes else ""
    return f"{moved}, computed again: {again} tokens" if again else moved


def candidates_table(console: Console, record: Record) -> Table:
    """Every plan that was considered, with its price and what spoke against it."""
    rows = table(
        console,
        "plan", "workers", "TTFT ms", "TPOT ms", "transfer ms", "verdict", right=(2, 3, 4),
        title="Plans considered",
    )  # fmt: skip
    chosen = record.get("chosen")
    for each in record.get("candidates") or []:
        verdict = "chosen" if each == chosen else each.get("why_not") or "possible"
        rows.add_row(
            str(each.get("plan")),
            " -> ".join((each.get("workers") or {}).values()),
            ms(each.get("predicted_ttft_ms")),
            ms(each.get("predicted_tpot_ms")),
            ms(each.get("transfer_ms")),
            verdict,
        )
    return rows


def summary(record: Record) -> str:
    """One line on the request itself."""
    actual: Record = record.get("actual") or {}
    cached = record.get("cached_tokens") or 0
    targets = ", ".join(
        f"{name.removesuffix('_ms')} {value:g} ms"
        for name, value in (record.get("targets") or {}).items()
        if value is not None
    )
    met = "met" if actual.get("met_targets") else "missed"
    return (
        f"request {record.get('request_id')}: class {record.get('class')}, "
        f"{record.get('prompt_tokens')} prompt tokens ({cached} cached), "
        f"{actual.get('output_tokens', 0)} output tokens, {actual.get('finish', 'running')}, "
        f"targets ({targets or 'none'}) {met}"
    )


def ms(value: float | None) -> str:
    """Write milliseconds for a table; "-" where nothing was measured."""
    return "-" if value is None else f"{value:.1f}"
