"""`/metrics` of one native worker, in Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from workers.native.engine.engine import Engine

_GAUGES = {
    "running_requests": "Requests that hold KV and are being computed",
    "waiting_requests": "Requests that wait for room",
    "kv_used_tokens": "KV tokens held by requests and offers",
    "kv_capacity_tokens": "KV tokens this worker can hold",
    "kv_cached_tokens": "KV tokens that a later prompt can find by its prefix",
    "offers": "Hand-offs that wait to be read, or are being read",
    "prefill_tokens_per_second": "Recent prefill speed of unmixed steps",
    "decode_tokens_per_second": "Recent decode speed of a single stream",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished prompts",
    "cached_prompt_tokens": "Prompt tokens that came from the prefix cache",
    "output_tokens": "Generated tokens",
    "steps": "Engine steps",
    "step_seconds": "Time spent in engine steps",
    "preemptions": "Requests put back because the KV cache was full",
    "evicted_blocks": "Cached KV blocks overwritten",
    "pulls": "Hand-offs received",
    "pulled_bytes": "Bytes of KV received in hand-offs",
    "pull_failures": "Hand-offs that failed on this side",
    "step_failures": "Engine steps that raised an error",
}


class WorkerCollector(Collector):
    """Reads the engine's counters when asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        values = self._values()
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"splitserve_worker_{name}", text, value=values[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"splitserve_worker_{name}", text, value=values[name])
        yield self._by_reason("finished", "Choices ended, by reason", self._engine.stats().finished)
        yield self._by_reason("offers_ended", "Offers ended, by reason", self._engine.offers.ended)

    @staticmethod
    def _by_reason(name: str, text: str, counts: dict[str, int]) -> CounterMetricFamily:
        family = CounterMetricFamily(f"splitserve_worker_{name}", text, labels=["reason"])
        for reason, count in counts.copy().items():
            family.add_metric([reason], count)
        return family

    def _values(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {
            "running_requests": stats.running,
            "waiting_requests": stats.waiting,
            "kv_used_tokens": stats.kv_used_tokens,
            "kv_capacity_tokens": stats.kv_capacity_tokens,
            "kv_cached_tokens": stats.kv_cached_tokens,
            "offers": self._engine.offers.live,
            "prefill_tokens_per_second": stats.prefill_tok_s,
            "decode_tokens_per_second": stats.decode_tok_s,
            "prompt_tokens": stats.prompt_tokens,
            "cached_prompt_tokens": stats.cached_tokens,
            "output_tokens": stats.output_tokens,
            "steps": stats.steps,
            "step_seconds": stats.step_s,
            "preemptions": stats.preemptions,
            "evicted_blocks": stats.evicted_blocks,
            "pulls": stats.pulls,
            "pulled_bytes": stats.pulled_bytes,
            "pull_failures": stats.pull_failures,
            "step_failures": stats.failures,
        }


def render(engine: Engine) -> bytes:
    """Return the exposition text."""
    registry = CollectorRegistry()
    registry.register(WorkerCollector(engine))
    return generate_latest(registry)
