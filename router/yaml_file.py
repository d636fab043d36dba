"""Reading a YAML file against a pydantic model, so that every fault is one line with its place."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from router.errors import SettingsError

Location = tuple[int | str, ...]
_LONGEST_SHOWN = 60  # characters of a refused value


@dataclass(frozen=True, slots=True)
class Document:
    """What a file holds, and on which line each key and list item stands."""

    name: str
    data: Any
    lines: dict[Location, int] = field(default_factory=dict)

    def place(self, location: Location) -> str:
        """`FILE:LINE: a.b[0].c: `, with the nearest line known."""
        known = location
        while known and known not in self.lines:
            known = known[:-1]
        line = f":{self.lines[known]}" if known in self.lines else ""
        shown = f"{dotted(location)}: " if location else ""
        return f"{self.name}{line}: {shown}" if self.name else shown


def dotted(location: Location) -> str:
    """Write a location as people do: `models.llama.workers[0].role`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location]
    return "".join(parts).removeprefix(".")


def read_yaml(path: Path) -> Document:
    """Read one mapping from a file; an empty file is an empty mapping. Raises SettingsError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: there is no such file; name an existing one with -c"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SettingsError(f"{path}: cannot be read ({reason}); name a YAML file") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}{_yaml_cause(error)}") from error
    document = Document(str(path), {} if data is None else data, {})
    if not isinstance(document.data, dict):
        raise SettingsError(
            f"{path}:1: it holds a {type(data).__name__} where keys belong; "
            "write lines like `listen: 127.0.0.1:8000`"
        )
    if node is not None:
        _note_lines(node, (), document)
    return document


def _yaml_cause(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or error
    return f"{line}: it is no valid YAML ({problem}); mend the indentation or quoting there"


def _note_lines(node: yaml.Node, location: Location, document: Document) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            document.lines[(*location, index)] = item.start_mark.line + 1
            _note_lines(item, (*location, index), document)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[Hashable] = set()
    for key, value in node.value:
        here = (*location, str(key.value))
        if key.value in seen:
            raise SettingsError(
                f"{document.name}:{key.start_mark.line + 1}: {dotted(here)}: this key is there "
                "twice; keep one of the two"
            )
        seen.add(key.value)
        document.lines[here] = key.start_mark.line + 1
        _note_lines(value, here, document)


def explain(
    error: ValidationError, model: type[BaseModel], document: Document | None = None
) -> str:
    """Return the first fault as one line: place, cause, mend.

    Unknown keys come first, since a misspelt key is often why another one is missing.
    """
    faults = sorted(error.errors(include_url=False), key=lambda f: f["type"] != "extra_forbidden")
    fault = faults[0]
    location: Location = tuple(part for part in fault["loc"] if part != "[key]")
    document = document or Document("", {})
    return document.place(location) + _cause_and_mend(fault, location, model)


def _cause_and_mend(fault: Any, location: Location, model: type[BaseModel]) -> str:
    if fault["type"] == "extra_forbidden":
        known = _keys_at(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(known)}"
        return f"unknown key; {hint}"
    info = _field_at(model, location)
    mend = f"write {info.description}" if info and info.description else ""
    own = fault.get("ctx", {}).get("error")
    if own is not None and _is_model(_type_at(model, location)):
        return str(own)  # about several keys at once, so no one description mends it
    if fault["type"] == "missing":
        return f"this key is missing; {mend or 'write it'}"
    cause = str(own) if own is not None else f"{_shown(fault['input'])} does not fit"
    return f"{cause}; {mend or fault['msg']}"


def _shown(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def _keys_at(model: type[BaseModel], location: Location) -> list[str]:
    section = _type_at(model, location)
    return list(section.model_fields) if _is_model(section) else []


def _type_at(model: type[BaseModel], location: Location) -> Any:
    annotation: Any = model
    for part in location:
        annotation = _inside(annotation, part)
    return annotation


def _field_at(model: type[BaseModel], location: Location) -> FieldInfo | None:
    """The description that covers this location: its own, else that of the list around it."""
    annotation: Any = model
    found: FieldInfo | None = None
    for part in location:
        if _is_model(annotation):
            found = annotation.model_fields.get(str(part))
        annotation = _inside(annotation, part)
    return found


def _inside(annotation: Any, part: int | str) -> Any:
    """The type of `part` within a model, a list, a mapping or an optional of these."""
    if _is_model(annotation):
        info = annotation.model_fields.get(str(part))
        return _required(info.annotation) if info else None
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return _required(arguments[1])
    return _required(arguments[0]) if get_origin(annotation) is tuple else None


def _required(annotation: Any) -> Any:
    arguments = [each for each in get_args(annotation) if each is not type(None)]
    optional = type(None) in get_args(annotation)
    return arguments[0] if optional and arguments else annotation


def _is_model(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, BaseModel)
