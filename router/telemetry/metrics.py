"""Prometheus metrics of the router. Labels are bounded: classes, plans and workers of the fleet."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from router.telemetry.records import Record
from splitserve.scheduling import Scheduler

_LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_GAP_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class RouterMetrics:
    """All series, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self._requests = Counter(
            "splitserve_requests", "Requests ended, by class, plan and end",
            ("service_class", "plan", "finish"), registry=registry,
        )  # fmt: skip
        self._good = Counter(
            "splitserve_requests_met_targets", "Requests that ended within their targets",
            ("service_class",), registry=registry,
        )  # fmt: skip
        self._ttft = Histogram(
            "splitserve_ttft_seconds", "Arrival to first token", ("service_class",),
            buckets=_LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._tpot = Histogram(
            "splitserve_tpot_seconds", "Mean gap between a request's tokens", ("service_class",),
            buckets=_GAP_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._queue = Histogram(
            "splitserve_queue_seconds", "Arrival to dispatch", ("service_class",),
            buckets=_LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self._transfer_bytes = Counter(
            "splitserve_handoff_bytes", "KV bytes moved between workers", registry=registry
        )
        self._transfer_s = Histogram(
            "splitserve_handoff_seconds", "Time KV took to move", buckets=_LATENCY_BUCKETS_S,
            registry=registry,
        )  # fmt: skip
        self._recomputes = Counter(
            "splitserve_handoff_recomputes",
            "Hand-offs whose decode worker computed the prompt again", registry=registry,
        )  # fmt: skip
        self._recomputed = Counter(
            "splitserve_handoff_recomputed_tokens",
            "Prompt tokens handed over and computed again", registry=registry,
        )  # fmt: skip
        self._shadow_checks = Counter(
            "splitserve_shadow_checks", "Answers of pairs compared with their decode worker's own",
            ("result",), registry=registry,
        )  # fmt: skip
        self._quarantined = Gauge(
            "splitserve_pairs_quarantined", "Pairs that get no hand-offs for now", registry=registry
        )
        self._retries = Counter(
            "splitserve_retries", "Attempts beyond a request's first", registry=registry
        )
        self._queued = Gauge("splitserve_queued_requests", "Requests that wait", registry=registry)
        self._live = Gauge("splitserve_live_requests", "Requests not ended", registry=registry)
        self._in_flight = Gauge(
            "splitserve_worker_in_flight",
            "Legs ordered from a worker",
            ("worker",),
            registry=registry,
        )
        self._model_error = Gauge(
            "splitserve_model_error_ratio",
            "Mean relative error of the latency model",
            ("worker", "phase"),
            registry=registry,
        )
        self._children: dict[str, tuple[Histogram, Histogram, Histogram, Counter]] = {}
        self._ends: dict[tuple[str, str, str], Counter] = {}

    def saw_end(self, record: Record) -> None:
        """Count a request that has ended."""
        service_class = record.request.service_class
        chosen = record.choice.chosen
        key = (service_class, chosen.plan.value if chosen else "none", record.finish)
        counter = self._ends.get(key)
        if counter is None:
            counter = self._ends[key] = self._requests.labels(*key)
        counter.inc()
        ttft, tpot, queue, good = self._of_class(service_class)
        queue.observe(record.queue_s)
        if record.ttft_s is not None:
            ttft.observe(record.ttft_s)
        if record.tpot_s is not None:
            tpot.observe(record.tpot_s)
        if record.met_targets:
            good.inc()
        if record.transfer_s is not None:
            self._transfer_s.observe(record.transfer_s)
            self._transfer_bytes.inc(record.transfer_bytes)
        if record.recomputed_tokens:
            self.saw_recompute(record.recomputed_tokens)
        if record.attempts > 1:
            self._retries.inc(record.attempts - 1)

    def saw_shadow_check(self, result: str) -> None:
        """Count a shadow check by how it ended."""
        self._shadow_checks.labels(result).inc()

    def saw_recompute(self, tokens: int) -> None:
        """Count prompt tokens that a decode worker computed although they were handed over."""
        self._recomputes.inc()
        self._recomputed.inc(tokens)

    def _of_class(self, name: str) -> tuple[Histogram, Histogram, Histogram, Counter]:
        known = self._children.get(name)
        if known is None:
            known = (
                self._ttft.labels(name),
                self._tpot.labels(name),
                self._queue.labels(name),
                self._good.labels(name),
            )
            self._children[name] = known
        return known

    def render(self, scheduler: Scheduler) -> bytes:
        """Return the exposition text, gauges read now."""
        self._queued.set(scheduler.queued)
        self._live.set(scheduler.live)
        self._quarantined.set(len(scheduler.ledger.pairs.quarantined))
        self._in_flight.clear()
        self._model_error.clear()
        for worker_id, account in scheduler.ledger.workers.items():
            self._in_flight.labels(worker_id).set(account.in_flight)
            model = account.model
            self._model_error.labels(worker_id, "prefill").set(model.prefill_drift.error)
            self._model_error.labels(worker_id, "decode").set(model.decode_drift.error)
        return generate_latest(self.registry)
