"""Which workers hand over to which, and why others do not, as /admin/workers shows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from splitserve.messages import Role, WorkerSnapshot
from splitserve.scheduling.ledger import Ledger

SHOWN_PAIRS = 32  # of one worker; a fleet of hundreds has too many to show them all


def pairs_of(worker: WorkerSnapshot, ledger: Ledger, now_s: float) -> dict[str, Any]:
    """Return a worker's pairs in either part, the first `SHOWN_PAIRS`, and whether that is all."""
    found = list(islice(_pairs(worker, ledger, now_s), SHOWN_PAIRS + 1))
    return {"pairs": found[:SHOWN_PAIRS], "more_pairs": len(found) > SHOWN_PAIRS}


def pairing_fields(key: str) -> dict[str, str]:
    """Return the fields of a pairing key."""
    return dict(part.partition("=")[::2] for part in key.split(";") if part)


def _pairs(worker: WorkerSnapshot, ledger: Ledger, now_s: float) -> Iterator[dict[str, Any]]:
    """Yield pairs with workers of the same model, where roles allow them and one side can move KV.

    Two workers that both cannot are no pair that anybody would expect.
    """
    for account in ledger.workers.values():
        other = account.snapshot
        if other.worker_id == worker.worker_id or not set(other.models) & set(worker.models):
            continue
        if not other.connector and not worker.connector:
            continue
        for part, prefill, decode in (("prefill", worker, other), ("decode", other, worker)):
            if prefill.role is not Role.DECODE and decode.role is not Role.PREFILL:
                shown = {"with": other.worker_id, "as": part}
                yield shown | _judged(prefill, decode, ledger, now_s)


def _judged(
    prefill: WorkerSnapshot, decode: WorkerSnapshot, ledger: Ledger, now_s: float
) -> dict[str, Any]:
    why_not = ledger.pairs.why_not(prefill, decode)
    judged: dict[str, Any] = {"ok": not why_not, "why_not": why_not or None}
    known = ledger.pairs.quarantined.get((prefill.worker_id, decode.worker_id))
    if known is not None:
        judged["quarantine_s"] = round(max(0.0, known.until_s - now_s), 1)
    return judged
