"""Scenarios: a fleet, its traffic and its windows, read from a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from splitserve.messages import Slo
from splitserve.simulation.toml_table import ScenarioError, TomlTable
from splitserve.simulation.world import World
from splitserve.simulation.world_file import NO_LIMIT, read_world


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets of a class; that for the first token may grow with the prompt."""

    ttft_s: float | None = None
    ttft_per_prompt_token_s: float = 0.0
    tpot_s: float | None = None
    deadline_s: float | None = None

    def slo(self, prompt_tokens: int) -> Slo:
        """Return the targets of one request."""
        if self.ttft_s is None:
            return Slo(None, self.tpot_s, self.deadline_s)
        ttft_s = self.ttft_s + self.ttft_per_prompt_token_s * prompt_tokens
        return Slo(ttft_s, self.tpot_s, self.deadline_s)


@dataclass(frozen=True, slots=True)
class Traffic:
    """One class of requests and the trace they come from, below the folder of traces."""

    service_class: str
    trace: str
    kind: str = ""
    targets: Targets = Targets()
    max_prompt_tokens: int = NO_LIMIT
    max_output_tokens: int = NO_LIMIT


@dataclass(frozen=True, slots=True)
class BatchDump:
    """Jobs that all come at once; none by default at a rate above `up_to_rate`."""

    lengths: str
    jobs: int
    at_s: float
    up_to_rate: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Windows:
    """Stretches of the traces that are played. Arrivals in the first `scored_s` are counted."""

    starts_s: tuple[float, ...]
    length_s: float
    scored_s: float


@dataclass(frozen=True, slots=True)
class ServeScenario:
    """Policies side by side on windows of traffic."""

    name: str
    world: World
    traffic: tuple[Traffic, ...]
    windows: Windows
    batch: BatchDump | None
    groups: Mapping[str, tuple[str, ...]]
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class DecisionScenario:
    """One newcomer between a prefill and a decode worker, over links and prompts.

    `streams` are the numbers of requests that decode already, each with `context_tokens`.
    """

    name: str
    world: World
    link_gbit_s: tuple[float, ...]
    prompts_tokens: tuple[int, ...]
    streams: tuple[int, ...]
    context_tokens: int
    stream_output_tokens: int
    output_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class FidelityScenario:
    """A recorded run of a real engine, to be played through a simulated one."""

    name: str
    world: World
    recording: str
    seed: int


Scenario = ServeScenario | DecisionScenario | FidelityScenario


def load(path: Path) -> Scenario:
    """Read a scenario. Raises ScenarioError."""
    try:
        with path.open("rb") as file:
            top = TomlTable(tomllib.load(file), str(path))
    except FileNotFoundError as error:
        raise ScenarioError(f"{path}: there is no such file") from error
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ScenarioError(f"{path}: {error}") from error
    kind = top.text("kind")
    readers: dict[str, Callable[[str, TomlTable], Scenario]]
    readers = {"serve": _serve, "decision": _decision, "fidelity": _fidelity}
    if kind not in readers:
        raise ScenarioError(f"{path}: kind must be one of {', '.join(readers)}, not {kind!r}")
    scenario = readers[kind](path.stem, top)
    top.close()
    return scenario


def exact(world: World) -> World:
    """Return the same world with a router that knows every worker's true coefficients."""
    told = tuple(
        replace(w, snapshot=replace(w.snapshot, coefficients=w.coefficients, exact=True))
        for w in world.workers
    )
    return replace(world, workers=told)


# --- kinds ----------------------------------------------------------------------------------------


def _serve(name: str, top: TomlTable) -> ServeScenario:
    windows = top.table("windows")
    length_s = windows.number("length_s")
    read = Windows(windows.numbers("starts_s"), length_s, windows.number("scored_s", length_s))
    windows.close()
    groups = top.table("groups")
    grouped = {key: groups.texts(key) for key in groups.keys()}  # noqa: SIM118
    traffic = tuple(_traffic(table) for table in top.tables("traffic"))
    known = {t.service_class for t in traffic}
    for key, members in grouped.items():
        if not known.issuperset(members):
            raise ScenarioError(f"{groups.place}: {key} names a class that has no [[traffic]]")
    batch = _batch(top.table("batch")) if top.has("batch") else None
    return ServeScenario(
        name,
        read_world(top),
        traffic,
        read,
        batch,
        grouped,
        top.number("rate", 1.0),
        top.whole("seed", 1),
    )


def _decision(name: str, top: TomlTable) -> DecisionScenario:
    sweep = top.table("sweep")
    world = read_world(top)
    if len(world.workers) != 2:
        raise ScenarioError(f"{top.place}: a decision is between two workers")
    scenario = DecisionScenario(
        name,
        world,
        sweep.numbers("link_gbit_s"),
        tuple(int(n) for n in sweep.numbers("prompts_tokens")),
        tuple(int(n) for n in sweep.numbers("streams")),
        sweep.whole("context_tokens", least=1),
        sweep.whole("stream_output_tokens", least=2),
        sweep.whole("output_tokens", least=1),
        top.whole("seed", 1),
    )
    sweep.close()
    return scenario


def _fidelity(name: str, top: TomlTable) -> FidelityScenario:
    return FidelityScenario(name, read_world(top), top.text("recording"), top.whole("seed", 1))


# --- parts ----------------------------------------------------------------------------------------


def _traffic(table: TomlTable) -> Traffic:
    targets = table.table("targets")
    read = Traffic(
        table.text("class"),
        table.text("trace"),
        table.text("format", ""),
        Targets(
            _seconds(targets, "ttft_ms"),
            targets.number("ttft_per_prompt_token_ms", 0.0) / 1e3,
            _seconds(targets, "tpot_ms"),
            _seconds(targets, "deadline_ms"),
        ),
        table.whole("max_prompt_tokens", NO_LIMIT, least=1),
        table.whole("max_output_tokens", NO_LIMIT, least=1),
    )
    targets.close()
    table.close()
    return read


def _seconds(table: TomlTable, key: str) -> float | None:
    known = table.has(key)
    value = table.number(key, 0.0) / 1e3
    return value if known else None


def _batch(table: TomlTable) -> BatchDump:
    batch = BatchDump(
        table.text("lengths"),
        table.whole("jobs"),
        table.number("at_s"),
        table.number("up_to_rate", float("inf")),
        table.number("deadline_s", 86_400.0),
    )
    table.close()
    return batch
