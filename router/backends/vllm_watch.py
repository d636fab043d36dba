"""What a vLLM worker is, how busy it is, and what its counters say of hand-overs."""

from __future__ import annotations

import logging
from dataclasses import replace

from router.backends.base import Target, Unusable, WorkerRestarted
from router.backends.probing import get_json
from router.backends.prometheus_text import Series
from router.backends.vllm_connectors import Connector, connector_of
from router.backends.vllm_events import CacheLosses, KvEvents
from router.backends.vllm_facts import (
    BY_SOURCE,
    EXPIRED,
    KV_USAGE,
    READ_TOO_LATE,
    RUNNING,
    WAITING,
    VllmFacts,
    read_facts,
    read_metrics,
    started_s,
)
from router.backends.vllm_reuse import ReuseCheck
from router.upstream import Upstream
from splitserve.messages import Role, WorkerSnapshot

log = logging.getLogger("splitserve.vllm")

ENGINE = "vllm"
_ASSUMED_RUNNING = 256


class VllmWatch:
    """Asks one worker. What was found out is there once `probe` has returned."""

    def __init__(self, target: Target, upstream: Upstream) -> None:
        self.worker_id = target.worker_id
        self.origin = target.origin
        self.connector: Connector | None = None
        self.takes_priority = False
        self.context_tokens = 0
        self.reuse = ReuseCheck()
        self._target = target
        self._upstream = upstream
        self._options = target.options
        self._headers = target.options.headers
        self._started_s = 0.0
        self._late_reads = 0.0
        self._events: KvEvents | None = None

    async def probe(self) -> WorkerSnapshot:
        """Ask what it is. Raises ValueError when it is not vLLM, and Unusable."""
        facts = await read_facts(self._upstream, self.origin, self._headers)
        kv = self._options.kv
        if kv is not None and kv.connector.startswith("nixl") and facts.lacks_nixl:
            raise Unusable(
                f"its kv says {kv.connector}, but it runs without NIXL; "
                "start it with --kv-transfer-config, or take kv out of its entry"
            )
        self._started_s = facts.started_s
        self.context_tokens = facts.context_tokens
        self.takes_priority = facts.takes_priority
        self.connector = connector_of(kv, facts.block_tokens) if kv is not None else None
        self._events = self._listen(facts)
        role = self._target.role
        if self.connector is None and role is Role.AUTO:
            role = Role.AGGREGATED
        return WorkerSnapshot(
            worker_id=self.worker_id,
            role=role,
            engine=ENGINE,
            models=facts.models,
            connector=self.connector.name if self.connector else "",
            pairing_key=_pairing_key(facts) if self.connector else "",
            max_running=self._options.max_running or _ASSUMED_RUNNING,
            kv_capacity_tokens=facts.kv_capacity_tokens,
            max_context_tokens=facts.context_tokens,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            notes=self._notes(facts),
        )

    def _listen(self, facts: VllmFacts) -> KvEvents | None:
        if not self._options.kv_events:
            return None
        try:
            return KvEvents(self._options.kv_events, facts.block_tokens)
        except ImportError as error:
            raise Unusable(
                f"its kv_events need pyzmq ({error}); pip install 'splitserve[vllm]', "
                "or take kv_events out of its entry"
            ) from error

    def _notes(self, facts: VllmFacts) -> tuple[str, ...]:
        notes = [f"version {facts.version}"]
        if not self._options.max_running:
            notes.append(
                f"max_running {_ASSUMED_RUNNING} is assumed, since it does not tell; "
                "write its --max-num-seqs as max_running"
            )
        if self.connector is None and facts.has_nixl:
            notes.append("it has NIXL, which is not used; write kv into its entry to split with it")
        return tuple(notes)

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Read gauges, and whether decode workers used what they were promised.

        Raises WorkerRestarted when another process answers.
        """
        losses = self._events.losses() if self._events is not None else CacheLosses()
        known = replace(
            known, cache_removed_tokens=losses.removed_tokens, cache_cleared=losses.cleared
        )
        look = self.reuse.look()
        series = await read_metrics(self._upstream, self.origin, self._headers)
        if series is None:
            status, _ = await get_json(self._upstream, self.origin, b"/health", self._headers)
            if status != 200:
                raise ValueError(f"GET /health answered {status}")
            return known
        if started_s(series) != self._started_s:
            raise WorkerRestarted("the worker was restarted")
        used_for_nothing = self.reuse.settle(look, _not_computed_tokens(series))
        if used_for_nothing:
            log.warning("%s computed %d handed-over tokens again", self.worker_id, used_for_nothing)
            self._target.on_recompute(used_for_nothing)
        self._note_late_reads(series)
        usages = [sample.value for sample in series.of(KV_USAGE)]
        share = sum(usages) / len(usages) if usages else 0.0
        return replace(
            known,
            running=int(series.total(RUNNING)),
            waiting=int(series.total(WAITING)),
            kv_used_tokens=int(min(1.0, share) * known.kv_capacity_tokens),
        )

    def _note_late_reads(self, series: Series) -> None:
        late_reads = series.total(READ_TOO_LATE)
        if late_reads > self._late_reads:
            log.warning(
                "%s: %d hand-offs were read after their lease, and their answers may be wrong "
                "(%d leases ran out so far); raise kv_lease_duration",
                self.worker_id, late_reads - self._late_reads, series.total(EXPIRED),
            )  # fmt: skip
        self._late_reads = late_reads


def _not_computed_tokens(series: Series) -> float:
    """Prompt tokens that came from another worker or from its own cache."""
    sources = ("external_kv_transfer", "local_cache_hit")
    return sum(series.total(BY_SOURCE, source=source) for source in sources)


def _pairing_key(facts: VllmFacts) -> str:
    """What the two must share; NIXL compares more of it when they meet.

    The model is compared by the name it was loaded by, as NIXL does.
    """
    fields = {
        "vllm": facts.version,
        "root": facts.root,
        "kv_cache_dtype": facts.kv_cache_dtype,
    }
    return ";".join(f"{name}={value.replace(';', ',')}" for name, value in fields.items())
