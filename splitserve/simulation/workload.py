"""The requests of a scenario's window: traces read, cut, thinned or repeated, targets set."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from splitserve.messages import Slo
from splitserve.simulation.readers import TraceError, read_lengths, read_trace
from splitserve.simulation.scenario import BatchDump, ServeScenario, Traffic
from splitserve.simulation.trace import TraceRequest, bounded, scale_rate, window

BATCH_CLASS = "batch"


class TraceFolder:
    """A folder of traces; each file is read once. Traces with an absolute path are found too."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._traces: dict[tuple[str, str], list[TraceRequest]] = {}
        self._lengths: dict[str, list[tuple[int, int]]] = {}

    def path(self, name: str) -> Path:
        """Return where a trace lies. Raises TraceError when no folder is known."""
        if Path(name).is_absolute():
            return Path(name)
        if self._folder is None:
            raise TraceError(f"{name}: no folder of traces is known; give one with --traces")
        return self._folder / name

    def requests(self, name: str, kind: str) -> list[TraceRequest]:
        """Return all requests of a trace."""
        if (name, kind) not in self._traces:
            self._traces[name, kind] = read_trace(self.path(name), kind)
        return self._traces[name, kind]

    def lengths(self, name: str) -> list[tuple[int, int]]:
        """Return (prompt, output) lengths."""
        if name not in self._lengths:
            self._lengths[name] = read_lengths(self.path(name))
        return self._lengths[name]


def batch_jobs(scenario: ServeScenario, rate: float, wanted: int | None) -> int:
    """How many batch jobs a run has: as asked, else the scenario's own where its rate allows."""
    batch = scenario.batch
    if batch is None:
        return 0
    if wanted is not None:
        return wanted
    return batch.jobs if rate <= batch.up_to_rate else 0


def window_trace(
    scenario: ServeScenario,
    folder: TraceFolder,
    start_s: float,
    *,
    rate: float,
    jobs: int,
    seed: int,
) -> list[TraceRequest]:
    """Return one window's requests in order of arrival, times from its start.

    `seed` decides which requests are thinned out or repeated, and which lengths batch jobs have.
    """
    draw = random.Random(seed)
    found: list[TraceRequest] = []
    for traffic in scenario.traffic:
        recorded = folder.requests(traffic.trace, traffic.kind)
        played = window(recorded, start_s, start_s + scenario.windows.length_s)
        found += _classed(scale_rate(played, rate, draw), traffic)
    if scenario.batch is not None and jobs:
        found += _dump(scenario.batch, folder.lengths(scenario.batch.lengths), jobs, draw)
    return sorted(found, key=lambda r: r.at_s)


def _classed(requests: Iterable[TraceRequest], traffic: Traffic) -> Iterator[TraceRequest]:
    limits = (traffic.max_prompt_tokens, traffic.max_output_tokens)
    for request in bounded(requests, *limits):
        slo = traffic.targets.slo(request.prompt_tokens)
        yield replace(request, service_class=traffic.service_class, slo=slo)


def _dump(
    batch: BatchDump, lengths: list[tuple[int, int]], jobs: int, draw: random.Random
) -> Iterator[TraceRequest]:
    slo = Slo(deadline_s=batch.deadline_s)
    enough = jobs <= len(lengths)
    chosen = draw.sample(lengths, jobs) if enough else draw.choices(lengths, k=jobs)
    for prompt_tokens, output_tokens in chosen:
        yield TraceRequest(batch.at_s, prompt_tokens, output_tokens, BATCH_CLASS, slo)
