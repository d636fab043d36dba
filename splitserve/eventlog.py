"""Events as lines of JSON, and their replay through a fresh Scheduler.

Floats are written with `repr` precision, so a decoded event equals the recorded one and a replay
gives the same Commands, bit for bit.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any

from splitserve import messages
from splitserve.messages import Command, Event
from splitserve.scheduling.scheduler import Scheduler

_EVENTS = {kind.__name__: kind for kind in typing.get_args(Event)}


class EventLogError(ValueError):
    """A line of an event log that cannot be read; names the line and the cause."""


def encode(now_s: float, event: Event) -> str:
    """Return one line, without its newline."""
    record = {"now_s": now_s, "event": type(event).__name__, **_plain(event)}
    return json.dumps(record, separators=(",", ":"))


def encode_command(command: Command) -> str:
    """Return a command as one comparable line."""
    return json.dumps({"command": type(command).__name__, **_plain(command)}, sort_keys=True)


def decode(line: str, number: int = 0) -> tuple[float, Event]:
    """Read one line. Raises EventLogError when it is not an event."""
    try:
        record = json.loads(line)
        kind = _EVENTS[record.pop("event")]
        now_s = float(record.pop("now_s"))
        return now_s, typing.cast(Event, _revive(kind, record))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        detail = f"event log line {number}: {error!r}; is the file cut short?"
        raise EventLogError(detail) from error


def replay(lines: Iterable[str], scheduler: Scheduler) -> Iterator[list[Command]]:
    """Feed every recorded event to `scheduler`, yielding what it commands for each."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            now_s, event = decode(line, number)
            yield scheduler.step(event, now_s)


def _plain(value: Any) -> dict[str, Any]:
    return {f.name: _plain_value(getattr(value, f.name)) for f in fields(value)}


def _plain_value(value: Any) -> Any:
    if is_dataclass(value):
        return _plain(value)
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return value.value if isinstance(value, Enum) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, vars(messages))


def _revive(kind: type, record: dict[str, Any]) -> Any:
    hints = _hints(kind)
    return kind(**{name: _revive_value(hints[name], value) for name, value in record.items()})


def _revive_value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arm for arm in typing.get_args(hint) if arm is not type(None))
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if items[-1] is Ellipsis:
            return tuple(_revive_value(items[0], each) for each in value)
        return tuple(_revive_value(item, each) for item, each in zip(items, value, strict=True))
    if is_dataclass(hint):
        return _revive(typing.cast(type, hint), value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    return value
