"""A picture of a simulation's result: goodput and attainment per class, or regret, per policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

Json = dict[str, Any]

mpl.use("Agg")


def plot(result: Json, file: Path) -> None:
    """Write the picture; the file's ending decides the format. Raises ValueError, OSError."""
    policies: dict[str, Json] = result["policies"]
    serving = all("attainment" in figures for figures in policies.values())
    figure = Figure(figsize=(11, 1.2 + 0.45 * len(policies)), layout="constrained")
    if serving:
        left, right = figure.subplots(1, 2, sharey=True)
        _goodput(left, policies, result["classes"])
        _attainment(right, policies, result["classes"])
        figure.suptitle(f"{result['scenario']} at {result['rate']:g} times the recorded rate")
    else:
        axes = figure.subplots()
        names = list(policies)
        axes.barh(names, [100 * policies[name]["regret"] for name in names])
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xlabel("mean regret against the oracle, %")
        axes.invert_yaxis()
        figure.suptitle(str(result["scenario"]))
    figure.savefig(file, dpi=150)


def _goodput(axes: Any, policies: dict[str, Json], classes: list[str]) -> None:
    names = list(policies)
    left = [0.0] * len(names)
    for kind in classes:
        rates = []
        for name in names:
            counts = policies[name]["attainment"]
            met = sum(counts[k]["met"] for k in classes)
            share = counts[kind]["met"] / met if met else 0.0
            rates.append(share * policies[name]["goodput_rps"])
        axes.barh(names, rates, left=left, label=kind)
        left = [x + y for x, y in zip(left, rates, strict=True)]
    axes.set_xlabel("goodput, good requests per second")
    axes.invert_yaxis()
    axes.legend()


def _attainment(axes: Any, policies: dict[str, Json], classes: list[str]) -> None:
    height = 0.8 / len(classes)
    for place, kind in enumerate(classes):
        counts = [figures["attainment"][kind] for figures in policies.values()]
        shares = [100 * c["met"] / c["total"] for c in counts]
        below = [s - 100 * c["wilson95"][0] for s, c in zip(shares, counts, strict=True)]
        above = [100 * c["wilson95"][1] - s for s, c in zip(shares, counts, strict=True)]
        at = [row + (place - (len(classes) - 1) / 2) * height for row in range(len(policies))]
        axes.barh(at, shares, height, xerr=[below, above], label=kind, capsize=2)
    axes.set_xlim(0, 100)
    axes.set_xlabel("attainment, % (bars: 95 % Wilson interval)")
    axes.legend()
