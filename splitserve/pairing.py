"""May two workers exchange a KV cache? If not, why not, in words a person can act on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from splitserve.messages import PairJudged, Role, WorkerSnapshot


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


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Why a pair gets no hand-offs, although its keys fit, and until when."""

    reason: str
    until_s: float


@dataclass(slots=True)
class Pairs:
    """Which workers may exchange KV: what they say of it, and what was seen of their hand-offs.

    Quarantines are by (prefill worker, decode worker), and only of workers that are alive.
    """

    quarantined: dict[tuple[str, str], Quarantine] = field(default_factory=dict)

    def why_not(self, prefill: WorkerSnapshot, decode: WorkerSnapshot) -> str:
        """Return "" when `decode` may use KV computed by `prefill` now, else the reason."""
        why = why_not_pair(prefill, decode)
        if why or not self.quarantined:
            return why
        known = self.quarantined.get((prefill.worker_id, decode.worker_id))
        return f"quarantined: {known.reason}" if known is not None else ""

    def any(self, workers: Iterable[WorkerSnapshot]) -> bool:
        """True when some declared prefill worker may hand over to some declared decode worker."""
        known = list(workers)
        prefills = [w for w in known if w.role is Role.PREFILL]
        decodes = [w for w in known if w.role is Role.DECODE]
        return any(not self.why_not(p, d) for p in prefills for d in decodes)

    def judge(self, event: PairJudged) -> bool:
        """Take a judgement in, unless a longer one stands; True when it changed anything."""
        key = event.prefill_worker, event.decode_worker
        known = self.quarantined.get(key)
        if not event.reason:
            return self.quarantined.pop(key, None) is not None
        if known is not None and known.until_s >= event.until_s:
            return False
        self.quarantined[key] = Quarantine(event.reason, event.until_s)
        return known is None

    def lift(self, now_s: float) -> bool:
        """End quarantines whose time is over; True when there were any."""
        over = [key for key, known in self.quarantined.items() if known.until_s <= now_s]
        for key in over:
            del self.quarantined[key]
        return bool(over)

    def forget(self, worker_id: str) -> bool:
        """What comes back under this name is another process; True when anything was known."""
        gone = [key for key in self.quarantined if worker_id in key]
        for key in gone:
            del self.quarantined[key]
        return bool(gone)


def _differences(left: str, right: str, *, shared_only: bool) -> list[str]:
    fields = [dict(part.partition("=")[::2] for part in key.split(";")) for key in (left, right)]
    either, both = {*fields[0], *fields[1]}, fields[0].keys() & fields[1].keys()
    names = sorted(both if shared_only else either)
    return [
        f"{name} ({fields[0].get(name, 'none')} / {fields[1].get(name, 'none')})"
        for name in names
        if fields[0].get(name) != fields[1].get(name)
    ]
