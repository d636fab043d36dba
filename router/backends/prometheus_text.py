"""A few series out of a Prometheus text.

Engines print hundreds, and are asked once a second, so only what is wanted is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a series and the labels it stands under."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Series:
    """What was found."""

    samples: tuple[Sample, ...]

    def of(self, name: str, **labels: str) -> list[Sample]:
        """Return the samples of a series that have these labels among theirs."""
        wanted = labels.items()
        return [s for s in self.samples if s.name == name and wanted <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of those samples; 0.0 where there are none."""
        return sum(sample.value for sample in self.of(name, **labels))


def read_series(text: bytes, names: Iterable[str]) -> Series:
    """Return the samples of the series `names`. Raises ValueError for a line that is no sample."""
    wanted = frozenset(name.encode() for name in names)
    lines = [line for line in text.splitlines() if _name(line) in wanted]
    found = text_string_to_metric_families(b"\n".join(lines).decode("utf-8", "replace") + "\n")
    return Series(
        tuple(
            Sample(sample.name, sample.labels, float(sample.value))
            for family in found
            for sample in family.samples
        )
    )


def _name(line: bytes) -> bytes:
    """The name at the beginning of a line: up to the labels, or to the value where it has none."""
    return line.partition(b"{")[0].partition(b" ")[0]
