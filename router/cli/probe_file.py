"""A configuration out of what probing found."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from router.cli.errors import CommandFailed

if TYPE_CHECKING:
    from router.fleet_probe import Found
    from router.sections import WorkerSpec
    from splitserve.messages import Role

_HEAD = """\
# Written by splitserve probe: roles and the figures at the end of lines are what it found.
# Serve it with: splitserve route -c {name}
listen: 127.0.0.1:8000
"""
_WIDE = 10_000  # one worker, one line


def configuration(
    name: str, specs: Sequence[WorkerSpec], found: Sequence[Found], roles: dict[str, Role]
) -> str:
    """Return the text of a file: workers with one model under its name, the others beside."""
    of_model: dict[str, list[str]] = {}
    others: list[str] = []
    for spec, each in zip(specs, found, strict=True):
        models = each.snapshot.models
        lines = of_model.setdefault(models[0], []) if len(models) == 1 else others
        lines.append(_line(spec, each, roles[each.address.name], named=len(models) == 1))
    text = _HEAD.format(name=name)
    if of_model:
        text += "models:\n"
    for model, lines in of_model.items():
        text += f"  {_flow(model)}:\n    workers:\n" + "".join(f"      {line}" for line in lines)
    if others:
        text += "workers:\n" + "".join(f"  {line}" for line in others)
    return text


def write_configuration(path: Path, specs: Sequence[WorkerSpec], found: Sequence[Found]) -> None:
    """Write a file that `load` takes, whole or not at all. Raises CommandFailed."""
    from router.settings import load
    from splitserve.planning.suggestion import suggest_roles

    roles = suggest_roles([each.snapshot for each in found])
    text = configuration(path.name, specs, found, roles)
    try:
        with _beside(path) as draft:
            draft.write_text(text, encoding="utf-8")
            load(draft)
            draft.replace(path)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandFailed(f"{path} cannot be written ({reason}); name another file") from error


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(".yaml", f".{path.stem}-", path.parent)
    os.close(handle)
    draft = Path(name)
    draft.chmod(0o644)  # it holds no key, only names of variables
    try:
        yield draft
    finally:
        draft.unlink(missing_ok=True)


def _line(spec: WorkerSpec, found: Found, role: Role, *, named: bool) -> str:
    entry: dict[str, Any] = spec.model_dump(mode="json", exclude_unset=True)
    if named and "engine_model" not in entry:
        entry.pop("model", None)  # it stands above
    entry |= {"role": role.value}
    return f"- {_flow(entry)}  # {_facts(found)}\n"


def _facts(found: Found) -> str:
    facts = [f"{found.snapshot.engine} {found.version}".strip()]
    rates = {"prefill": found.snapshot.prefill_tok_s, "decode": found.snapshot.decode_tok_s}
    facts += [f"{phase} {rate:.0f} tok/s" for phase, rate in rates.items() if rate]
    return " ".join(", ".join(facts).split())


def _flow(value: object) -> str:
    """Write a value on one line; a name comes out quoted where YAML would read more into it."""
    text = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, width=_WIDE, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()
