"""What one worker process is told at start, and how that is written on a command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields

from workers.errors import BadSetting

ROLES = ("prefill", "decode", "aggregated", "auto")
LATER_ROLES = ("attention", "ffn", "drafter")
DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
_AT_LEAST_ONE = ("kv_tokens", "step_tokens", "max_running")
_AT_LEAST_ZERO = ("threads", "max_context_tokens", "parent_pid")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of one native worker; `model` is a folder, a file or a name to resolve.

    Raises BadSetting for a value that no worker can use.
    """

    model: str
    role: str = "aggregated"
    host: str = "127.0.0.1"
    port: int = 8001
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0  # 0: torch's own choice
    kv_tokens: int = 32768
    step_tokens: int = 512
    max_running: int = 64
    max_context_tokens: int = 0  # 0: the model's own
    lease_s: float = 30.0
    shared_memory: bool = True
    served_name: str = ""
    parent_pid: int = 0  # leave when this process is gone; 0: nobody

    def __post_init__(self) -> None:
        if self.role in LATER_ROLES:
            raise BadSetting("role", self.role, f"not in this version; use {_one_of(ROLES)}")
        if self.role not in ROLES:
            raise BadSetting("role", self.role, f"use {_one_of(ROLES)}")
        if self.dtype not in DTYPES:
            raise BadSetting("dtype", self.dtype, f"use {_one_of(DTYPES)}")
        if not _DEVICE.fullmatch(self.device):
            raise BadSetting("device", self.device, "use cpu, cuda or cuda:N")
        if not 0 <= self.port <= 65535:
            raise BadSetting("port", self.port, "use a number from 0 to 65535")
        if not self.lease_s > 0:
            raise BadSetting("lease-s", self.lease_s, "use seconds above 0")
        for names, least in ((_AT_LEAST_ONE, 1), (_AT_LEAST_ZERO, 0)):
            for name in names:
                if (value := getattr(self, name)) < least:
                    raise BadSetting(name.replace("_", "-"), value, f"use {least} or more")


def _one_of(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def to_arguments(settings: WorkerSettings) -> list[str]:
    """Write settings as arguments of `python -m workers`; `from_arguments` reads them back."""
    arguments: list[str] = []
    for field in fields(WorkerSettings):
        value = getattr(settings, field.name)
        option = field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments.append(f"--{option}={value}")
    return arguments


def from_arguments(arguments: Sequence[str]) -> WorkerSettings:
    """Read the arguments of `python -m workers`. Raises BadSetting; argparse exits with 2."""
    parser = argparse.ArgumentParser(prog="python -m workers", allow_abbrev=False)
    for field in fields(WorkerSettings):
        option = "--" + field.name.replace("_", "-")
        if field.default is MISSING:
            parser.add_argument(option, required=True)
        elif isinstance(field.default, bool):
            action = argparse.BooleanOptionalAction
            parser.add_argument(option, action=action, default=field.default)
        else:
            parser.add_argument(option, type=type(field.default), default=field.default)
    return WorkerSettings(**vars(parser.parse_args(arguments)))
