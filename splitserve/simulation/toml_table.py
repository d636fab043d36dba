"""A TOML table read key by key: values checked, unknown keys refused with the nearest one."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

Toml = Mapping[str, Any]


class ScenarioError(ValueError):
    """A scenario that cannot be used: names the place, the cause and the mend."""


class TomlTable:
    """One table of a file. Ask for every key, then `close` it."""

    def __init__(self, data: Toml, place: str) -> None:
        self.place = place
        self._data = data
        self._asked: set[str] = set()

    def has(self, key: str) -> bool:
        """True when the key is there."""
        return key in self._data

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number that is not negative."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self._wrong(key, "a number, not negative")
        return float(value)

    def whole(self, key: str, default: int | None = None, least: int = 0) -> int:
        """Return a whole number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"a whole number from {least} on")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of numbers, at least one."""
        values = self._get(key, None)
        if not isinstance(values, list) or not values:
            raise self._wrong(key, "a list of numbers")
        return tuple(TomlTable({key: value}, self.place).number(key) for value in values)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of strings."""
        values = self._get(key, None)
        if not isinstance(values, list) or not all(isinstance(v, str) for v in values):
            raise self._wrong(key, "a list of strings")
        return tuple(values)

    def table(self, key: str) -> TomlTable:
        """Return a table inside this one, an empty one where there is none."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "a table")
        return TomlTable(value, f"{self.place}: {key}")

    def tables(self, key: str) -> list[TomlTable]:
        """Return the tables of an array, at least one."""
        values = self._get(key, None)
        if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
            raise self._wrong(key, f"an array of tables, [[{key}]]")
        return [TomlTable(v, f"{self.place}: {key} {n}") for n, v in enumerate(values, 1)]

    def keys(self) -> tuple[str, ...]:
        """Every key that is there."""
        return tuple(self._data)

    def close(self) -> None:
        """Refuse what nobody asked for."""
        for key in self._data:
            if key not in self._asked:
                near = get_close_matches(key, self._asked, n=1)
                mend = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self._asked)}"
                raise ScenarioError(f"{self.place}: unknown key {key!r}; {mend}")

    def _get(self, key: str, default: object) -> Any:
        self._asked.add(key)
        value = self._data.get(key, default)
        if value is None:
            raise ScenarioError(f"{self.place}: {key} is missing")
        return value

    def _wrong(self, key: str, wanted: str) -> ScenarioError:
        return ScenarioError(f"{self.place}: {key} must be {wanted}, not {self._data.get(key)!r}")
