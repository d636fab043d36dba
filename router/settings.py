"""What one router process is told: `splitserve.yaml`, checked once and frozen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from router.errors import SettingsError
from router.sections import (
    Admin,
    HostPort,
    Limits,
    Listen,
    ModelSpec,
    Positive,
    Section,
    ServiceClass,
    ShadowCheck,
    Tenant,
    WorkerSpec,
)
from router.yaml_file import explain, read_yaml
from splitserve.scheduling.policies.catalog import by_name, names

DEFAULT_POLICY = "slack"


def _default_classes() -> dict[str, ServiceClass]:
    return {
        "interactive": ServiceClass(ttft_ms=1000.0, tpot_ms=50.0),
        "agent": ServiceClass(deadline_ms=5000.0),
        "batch": ServiceClass(deadline_s=86400.0),
    }


class RouterSettings(Section):
    """Everything the router is told at start. `workers` are those that belong to no named model."""

    listen: HostPort = Field(default=Listen())
    models: dict[str, ModelSpec] = Field(
        default={},
        description="models by name, each with its workers: llama: {workers: [{url: ...}]}",
    )
    workers: tuple[WorkerSpec, ...] = Field(
        default=(), description="a list of workers whose models are found by probing"
    )
    classes: dict[str, ServiceClass] = Field(
        default_factory=_default_classes,
        min_length=1,
        description="classes by name, like interactive: {ttft_ms: 1000, tpot_ms: 50}",
    )
    default_class: str = Field(default="interactive", description="the name of one of the classes")
    policy: str = Field(
        default=DEFAULT_POLICY, description=f"one of {', '.join(names())}, or package.module:Class"
    )
    tenants: tuple[Tenant, ...] = Field(default=(), description="a list of {name, key_env}")
    admin: Admin | None = Field(default=None, description="{key_env: NAME_OF_A_VARIABLE}")
    shadow_check: ShadowCheck = Field(
        default=ShadowCheck(), description="a block like {share: 0.002, at_join: true}"
    )
    limits: Limits = Field(default=Limits(), description="a block of limits, like {queue: 4096}")
    event_log: Path | None = Field(
        default=None, description="the path of a file to record events in"
    )
    report_interval_s: Positive = Field(
        default=1.0, description="seconds above 0 between two load reports"
    )

    probe_speeds: bool = Field(
        default=True,
        description="false to send no short requests to a new worker to learn its speed",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.default_class not in self.classes:
            raise ValueError(
                f"default_class {self.default_class!r} is no class here; "
                f"name one of {', '.join(self.classes)}"
            )
        by_name(self.policy)
        _refuse_repeats("worker name", (w.name for w in self.worker_specs if w.name))
        _refuse_repeats("worker", (f"{w.url} ({w.model})" for w in self.worker_specs if w.url))
        _refuse_repeats("tenant", (tenant.name for tenant in self.tenants))
        for name, spec in self.models.items():
            for worker in spec.workers:
                if worker.model not in (None, name):
                    raise ValueError(
                        f"a worker under models.{name} says model {worker.model!r}; "
                        "leave its model out or move it"
                    )
        return self

    @property
    def worker_specs(self) -> tuple[WorkerSpec, ...]:
        """Every worker of the file, each with its model's name filled in where there is one."""
        named = [
            worker.model_copy(update={"model": name})
            for name, spec in self.models.items()
            for worker in spec.workers
        ]
        return (*named, *self.workers)

    def require_keys(self, environ: Mapping[str, str]) -> None:
        """Raise SettingsError when a `key_env` names a variable that is not set."""
        wanted = [(f"tenants[{i}].key_env", each.key_env) for i, each in enumerate(self.tenants)]
        for worker in self.worker_specs:
            where = f"worker {worker.name or worker.url or worker.start}"
            wanted += [
                (f"{where}: {field}", name)
                for field, name in (
                    ("key_env", worker.key_env),
                    ("courier_key_env", worker.courier_key_env),
                )
                if name is not None
            ]
        if self.admin is not None:
            wanted.append(("admin.key_env", self.admin.key_env))
        for where, name in wanted:
            if not environ.get(name):
                raise SettingsError(
                    f"{where}: environment variable {name} is not set; "
                    f"export {name}=... or take this entry out"
                )


def _refuse_repeats(what: str, values: Iterator[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{what} {value} is there twice; take one out or rename it")
        seen.add(value)


def load(path: Path) -> RouterSettings:
    """Read a configuration file. Raises SettingsError, whose text is one line with the mend."""
    document = read_yaml(path)
    try:
        return RouterSettings.model_validate(document.data)
    except ValidationError as error:
        raise SettingsError(explain(error, RouterSettings, document)) from error


def build(data: Mapping[str, Any]) -> RouterSettings:
    """Make settings of what `load` would read from a file. Raises SettingsError."""
    try:
        return RouterSettings.model_validate(data)
    except ValidationError as error:
        raise SettingsError(explain(error, RouterSettings)) from error


def dump(settings: RouterSettings) -> str:
    """Write settings as YAML that `load` reads back to equal settings, without what is unset."""
    data = settings.model_dump(mode="json", exclude_none=True)
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


__all__ = [
    "DEFAULT_POLICY",
    "Admin",
    "Limits",
    "Listen",
    "ModelSpec",
    "RouterSettings",
    "ServiceClass",
    "Tenant",
    "WorkerSpec",
    "build",
    "dump",
    "load",
]
