"""The result of a simulation as tables for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from router.cli.console import stdout_console, table

if TYPE_CHECKING:
    from rich.console import Console

Figures = dict[str, Any]


def show(result: Figures) -> None:
    """Print what kind of result it is."""
    console = stdout_console()
    if "error" in result:
        _fidelity(console, result)
    elif "situations" in result:
        _decision(console, result)
    else:
        _serving(console, result)


def _serving(console: Console, result: Figures) -> None:
    policies: dict[str, Figures] = result["policies"]
    classes = list(next(iter(policies.values()))["attainment"])
    classes = [name for name in classes if name != "batch"]
    headings = [f"{name} %" for name in classes]
    rows = table(
        console,
        "policy", *headings, "good/s", "TTFT p50", "p99 ms", "TPOT p50", "p99 ms",
        "batch done", "batch tok/s", "x real time",
        right=tuple(range(1, len(headings) + 9)),
        title=f"{result['scenario']}: {result['rate']:g} times the recorded rate, "
        f"{result['windows']} windows, {result['batch_jobs']} batch jobs in each",
    )  # fmt: skip
    for name, figures in policies.items():
        rows.add_row(
            name,
            *(_share(figures["attainment"].get(kind)) for kind in classes),
            f"{figures['goodput_rps']:.2f}",
            *(_ms(figures["ttft_ms"][at]) for at in ("p50", "p99")),
            *(_ms(figures["tpot_ms"][at]) for at in ("p50", "p99")),
            " ".join(str(done) for done in figures["batch_jobs_done"]),
            f"{figures['batch_tok_s']:.0f}",
            f"{result['times_real'][name]:.0f}",
        )
    console.print(rows)
    if "bound" in result:
        share = 100 * result["bound"]["mean_of_windows"]
        console.print(f"\nNo scheduler can pass {share:.1f} % ({result['bound']['kind']}).")
    console.print("\nShares are of all requests scheduled, with their 95 % interval.")


def _share(count: Figures | None) -> str:
    if not count or not count["total"]:
        return "-"
    low, high = count["wilson95"]
    return f"{100 * count['met'] / count['total']:.1f} ({100 * low:.1f}-{100 * high:.1f})"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _decision(console: Console, result: Figures) -> None:
    rows = table(
        console,
        "policy", "mean regret", "worst", "wrong choices", "pauses summed",
        right=(1, 2, 3, 4),
        title=f"{result['scenario']}: {result['situations']} situations",
    )  # fmt: skip
    for name, figures in result["policies"].items():
        rows.add_row(
            name,
            f"{100 * figures['regret']:.1f} %",
            f"{100 * figures['worst_regret']:.0f} %",
            str(figures["wrong_choices"]),
            f"{100 * figures['regret_summed_pauses']:.1f} %",
        )
    console.print(rows)
    console.print(f"\nCost: {result['cost']}")


def _fidelity(console: Console, result: Figures) -> None:
    rows = table(
        console,
        "measure", "real mean ms", "simulated", "error", "p50", "p90", "p99",
        right=(1, 2, 3, 4, 5, 6),
        title=f"{result['scenario']}: {result['requests']} requests",
    )  # fmt: skip
    for name, error in result["error"].items():
        means = result["mean_ms"][name]
        rows.add_row(
            name,
            f"{means['real']:.1f}",
            f"{means['simulated']:.1f}",
            f"{100 * error:+.1f} %",
            *(f"{100 * e:+.1f} %" for e in result["error_of_percentiles"][name].values()),
        )
    console.print(rows)
