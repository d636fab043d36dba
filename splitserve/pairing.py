"""May two workers exchange a KV cache? If not, why not, in words a person can act on."""

from __future__ import annotations

from collections.abc import Iterable

from splitserve.messages import Role, WorkerSnapshot


def why_not_pair(prefill: WorkerSnapshot, decode: WorkerSnapshot) -> str:
    """Return "" when `decode` can use KV computed by `prefill`, else the reason.

    A pairing key is `name=value` fields joined by ";", so the reason can name the fields that
    differ instead of showing two hashes. Between engines, where one converts the other's KV, only
    fields that both have are compared: each engine has words of its own for layout and version.
    """
    if prefill.worker_id == decode.worker_id:
        return "one worker cannot hand over to itself"
    for worker in (prefill, decode):
        if not worker.connector:
            return f"{worker.worker_id} ({worker.engine}) has no way to move KV"
    converts = prefill.connector in decode.takes
    if prefill.connector != decode.connector and not converts:
        return f"connectors differ: {prefill.connector} and {decode.connector}"
    if prefill.pairing_key == decode.pairing_key:
        return ""
    differences = _differences(prefill.pairing_key, decode.pairing_key, shared_only=converts)
    return "KV differs in " + ", ".join(differences) if differences else ""


def any_pair(workers: Iterable[WorkerSnapshot]) -> bool:
    """True when some declared prefill worker can hand over to some declared decode worker."""
    known = list(workers)
    prefills = [w for w in known if w.role is Role.PREFILL]
    decodes = [w for w in known if w.role is Role.DECODE]
    return any(not why_not_pair(p, d) for p in prefills for d in decodes)


def _differences(left: str, right: str, *, shared_only: bool) -> list[str]:
    fields = [dict(part.partition("=")[::2] for part in key.split(";")) for key in (left, right)]
    either, both = {*fields[0], *fields[1]}, fields[0].keys() & fields[1].keys()
    names = sorted(both if shared_only else either)
    return [
        f"{name} ({fields[0].get(name, 'none')} / {fields[1].get(name, 'none')})"
        for name in names
        if fields[0].get(name) != fields[1].get(name)
    ]
