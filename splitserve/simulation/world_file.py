"""The part of a scenario file that describes workers, links and faults."""

from __future__ import annotations

from dataclasses import replace

from splitserve.messages import Role, WorkerSnapshot
from splitserve.performance.coefficients import KNOWN, Coefficients
from splitserve.simulation.driver import MODEL
from splitserve.simulation.job import EngineShape
from splitserve.simulation.toml_table import ScenarioError, TomlTable
from splitserve.simulation.world import LinkFault, SimulatedWorker, WorkerFault, World

GBIT_BYTES = 1e9 / 8
NO_LIMIT = 1 << 40  # the router holds nothing back because of a count of requests


def read_world(top: TomlTable) -> World:
    """Read [[workers]], [links], [engine] and [faults]; workers are named w0, w1, ... in order."""
    links, engine = top.table("links"), top.table("engine")
    priority = engine.flag("priority", False)
    reserve = engine.flag("reserve_prompt", True)
    workers: list[SimulatedWorker] = []
    for table in top.tables("workers"):
        count = table.whole("count", 1, least=1)
        worker = _worker(table, priority, reserve)
        for _ in range(count):
            snapshot = replace(worker.snapshot, worker_id=f"w{len(workers)}")
            workers.append(replace(worker, snapshot=snapshot))
    if not workers:
        raise ScenarioError(f"{top.place}: there are no [[workers]]")
    faults = top.table("faults")
    world = World(
        tuple(workers),
        link_bytes_s=links.number("gbit_s", 25.0) * GBIT_BYTES,
        link_latency_s=links.number("latency_ms", 10.0) / 1e3,
        declare_links=links.flag("declared", True),
        step_noise=engine.number("step_noise", 0.0),
        dispatch_s=engine.number("dispatch_ms", 1.0) / 1e3,
        report_s=engine.number("report_ms", 1.0) / 1e3,
        progress_s=engine.number("progress_ms", 50.0) / 1e3,
        snapshot_s=engine.number("snapshot_ms", 0.0) / 1e3,
        worker_faults=_worker_faults(faults, len(workers)),
        link_faults=_link_faults(faults, len(workers)),
    )
    for table in (links, engine, faults):
        table.close()
    return world


def _worker(table: TomlTable, priority: bool, reserve: bool) -> SimulatedWorker:
    budget = table.whole("step_tokens", 2048, least=1)
    true = _coefficients(table.table("true_ms"), budget)
    kv_tokens = table.whole("kv_tokens", least=1)
    shape = EngineShape(
        kv_tokens,
        table.whole("max_sequences", 256, least=1),
        table.whole("block_tokens", 16, least=1),
        priority,
        reserve,
    )
    role = table.text("role", "auto")
    if role not in list(Role):
        raise ScenarioError(f"{table.place}: role must be one of {', '.join(Role)}, not {role!r}")
    snapshot = WorkerSnapshot(
        "",
        Role(role),
        "simulated",
        (MODEL,),
        connector=table.text("connector", ""),
        soft_role=table.flag("soft_role", False),
        max_running=NO_LIMIT,
        kv_capacity_tokens=kv_tokens,
        kv_bytes_per_token=table.whole("kv_bytes_per_token", 131_072),
        step_tokens=budget,
        coefficients=_prior(table, true, budget),
    )
    table.close()
    return SimulatedWorker(snapshot, shape, true)


def _coefficients(table: TomlTable, budget: int) -> Coefficients:
    if table.has("known"):
        speed = _known(table, "known")
    else:
        speed = Coefficients(
            table.number("step") / 1e3,
            table.number("per_sequence") / 1e3,
            table.number("per_kv_token") / 1e3,
            table.number("prefill_step") / 1e3,
            table.number("per_prompt_token") / 1e3,
            table.number("per_prompt_token2") / 1e3,
        )
    table.close()
    return replace(speed, budget_tokens=budget)


def _prior(table: TomlTable, true: Coefficients, budget: int) -> Coefficients:
    if not table.has("prior"):
        return true
    return replace(_known(table, "prior"), budget_tokens=budget)


def _known(table: TomlTable, key: str) -> Coefficients:
    name = table.text(key)
    if name not in KNOWN:
        raise ScenarioError(f"{table.place}: {key} must be one of {', '.join(KNOWN)}, not {name!r}")
    return KNOWN[name]


def _worker_faults(faults: TomlTable, workers: int) -> tuple[WorkerFault, ...]:
    found = []
    for table in faults.tables("workers") if faults.has("workers") else ():
        back_s = table.number("back_s", 0.0)
        name = _worker_name(table, "worker", workers)
        found.append(WorkerFault(name, table.number("at_s"), back_s or None))
        table.close()
    return tuple(found)


def _link_faults(faults: TomlTable, workers: int) -> tuple[LinkFault, ...]:
    found = []
    for table in faults.tables("links") if faults.has("links") else ():
        back_s = table.number("back_s", 0.0)
        ends = (_worker_name(table, "from", workers), _worker_name(table, "to", workers))
        found.append(LinkFault(*ends, table.number("at_s"), back_s or None))
        table.close()
    return tuple(found)


def _worker_name(table: TomlTable, key: str, workers: int) -> str:
    name = table.text(key)
    if name not in {f"w{number}" for number in range(workers)}:
        raise ScenarioError(f"{table.place}: there is no worker {name!r}; they are w0, w1, ...")
    return name
