"""The sections of `splitserve.yaml`. A field's description says what to write there."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    model_validator,
)

from router.errors import BadWorkerUrl
from router.origin import parse_origin
from splitserve.messages import Role, Slo

_LISTEN = re.compile(r"((\[(?P<ipv6>[^\[\]]+)\]|(?P<name>[^:\s\[\]]+)):)?(?P<port>[0-9]{1,5})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")


class Section(BaseModel):
    """A part of the configuration: frozen, and unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Count = Annotated[int, Field(strict=True, gt=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]


class Listen(Section):
    """Where the router listens. In the file: `127.0.0.1:8000`, `[::1]:8000` or a port."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(strict=True, ge=0, le=65535)] = 8000

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the router."""
        anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return f"http://{Listen(host=anywhere.get(self.host, self.host), port=self.port)}"


def parse_listen(value: object) -> Listen:
    """Read host:port. Raises ValueError."""
    if isinstance(value, Listen):
        return value
    found = _LISTEN.fullmatch(str(value))
    if found is None or int(found["port"]) > 65535 or not _is_host(found):
        raise ValueError(
            f"{value!r} is no address; write host:port, like 127.0.0.1:8000 or [::1]:8000"
        )
    host = found["name"] or found["ipv6"] or "127.0.0.1"
    return Listen(host=host, port=int(found["port"]))


def _is_host(found: re.Match[str]) -> bool:
    try:
        return found["ipv6"] is None or bool(ipaddress.IPv6Address(found["ipv6"]))
    except ValueError:
        return False


def _check_url(value: str) -> str:
    try:
        return parse_origin(value).url
    except BadWorkerUrl as error:
        raise ValueError(error.cause) from error


def _check_name(value: str) -> str:
    # Names travel in `x-splitserve-workers: prefill=ID,decode=ID` and in metric labels.
    if not _NAME.fullmatch(value):
        raise ValueError("a name is letters, digits, '.', '_', ':' and '-'")
    return value


HostPort = Annotated[Listen, BeforeValidator(parse_listen), PlainSerializer(str, return_type=str)]
Url = Annotated[str, AfterValidator(_check_url)]
Name = Annotated[str, AfterValidator(_check_name)]


class KvTransfer(Section):
    """How a vLLM worker moves KV: what its `--kv-transfer-config` says, which no route tells."""

    connector: Literal["nixl-pull", "nixl-push", "example", "lmcache"] = Field(
        description="one of nixl-pull, nixl-push, example, lmcache (the worker's kv_connector)"
    )
    engine_id: str | None = Field(
        default=None, min_length=1, description="the prefill worker's fixed engine_id (nixl-push)"
    )
    side_channel: HostPort | None = Field(
        default=None, description="host:port of the worker's side channel (nixl-push)"
    )
    folder: str | None = Field(
        default=None, min_length=1, description="the shared folder (example)"
    )
    lease_s: Positive = Field(
        default=30.0, description="seconds above 0, the worker's kv_lease_duration"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.connector == "nixl-push" and (self.engine_id is None or self.side_channel is None):
            raise ValueError(
                "nixl-push needs engine_id and side_channel; write those the worker started with"
            )
        if self.connector == "example" and self.folder is None:
            raise ValueError("example needs folder; write the worker's shared_storage_path")
        return self


Engine = Literal["native", "vllm", "sglang", "llama.cpp", "openai"]
KeyEnv = Annotated[
    str,
    Field(
        pattern="^[A-Za-z_][A-Za-z0-9_]*$",
        description="the name of the environment variable that holds the key, like ALICE_KEY",
    ),
]


class WorkerSpec(Section):
    """One worker: where it runs (`url`) or how to start it (`start`, with `{port}` and `{host}`).

    `model` None: take the models that probing finds.
    """

    url: Url | None = Field(
        default=None, description="the worker's address, like http://10.0.0.5:8000"
    )
    start: str | None = Field(
        default=None, description="a shell command with {port} where its port goes"
    )
    start_timeout_s: Positive | None = Field(
        default=None, description="seconds above 0 the command may take to get ready (600)"
    )
    role: Role = Field(
        default=Role.AUTO, description=f"one of {', '.join(Role)} (what this worker may do)"
    )
    name: Name | None = Field(default=None, description="a short name, like gpu-1, or leave it out")
    courier: Url | None = Field(
        default=None, description="the address of the courier beside a llama.cpp worker"
    )
    courier_key_env: KeyEnv | None = None
    model: str | None = Field(
        default=None,
        min_length=1,
        description="the model's name, or leave it out to serve what is found",
    )
    engine_model: str | None = Field(
        default=None,
        min_length=1,
        description="the name the worker itself has for the model, where it differs",
    )
    max_running: Count | None = Field(
        default=None,
        description="a whole number above 0 of requests it gets at once, if not what it says",
    )
    engine: Engine | None = Field(
        default=None, description="native, vllm, sglang, llama.cpp or openai; found by probing"
    )
    key_env: KeyEnv | None = None
    kv: KvTransfer | None = Field(
        default=None, description="how a vLLM worker moves KV, like {connector: nixl-pull}"
    )
    kv_events: HostPort | None = Field(
        default=None, description="host:port where a vLLM worker publishes KV events"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.url is None) == (self.start is None):
            raise ValueError("a worker has either url or start; write one of the two")
        if self.engine_model is not None and self.model is None:
            raise ValueError("engine_model needs model; write the name that clients use there")
        if self.start_timeout_s is not None and self.start is None:
            raise ValueError("start_timeout_s needs start; leave it out for a worker with a url")
        if self.start is not None and "{port}" not in self.start:
            raise ValueError(
                "start names no {port}; put {port} where the command takes its port, "
                "like: vllm serve NAME --port {port}"
            )
        return self


class ModelSpec(Section):
    """The workers of one model."""

    workers: tuple[WorkerSpec, ...] = Field(
        min_length=1, description="a list of workers, like [{url: http://10.0.0.5:8000}]"
    )


class ServiceClass(Section):
    """Latency targets of a class of requests. A class without any is served as fast as it goes."""

    ttft_ms: Positive | None = Field(
        default=None, description="milliseconds above 0 to the first token"
    )
    tpot_ms: Positive | None = Field(
        default=None, description="milliseconds above 0 per output token"
    )
    deadline_ms: Positive | None = Field(
        default=None, description="milliseconds above 0 to the last token"
    )
    deadline_s: Positive | None = Field(
        default=None, description="seconds above 0 to the last token"
    )
    fail_fast: bool = Field(
        default=False, description="true to refuse at once what would miss its target"
    )

    @model_validator(mode="after")
    def _one_deadline(self) -> Self:
        if self.deadline_ms is not None and self.deadline_s is not None:
            raise ValueError("deadline_ms and deadline_s are the same target; write one of the two")
        return self

    @property
    def slo(self) -> Slo:
        """The targets in seconds."""
        deadline_s = self.deadline_s if self.deadline_ms is None else self.deadline_ms / 1e3
        return Slo(
            None if self.ttft_ms is None else self.ttft_ms / 1e3,
            None if self.tpot_ms is None else self.tpot_ms / 1e3,
            deadline_s,
        )


class Tenant(Section):
    """Who may send requests, and how much."""

    name: Name = Field(min_length=1, description="a short name, like alice")
    key_env: KeyEnv
    weight: Positive = Field(default=1.0, description="a share above 0; 1 is usual")
    tokens_per_minute: Count | None = Field(
        default=None, description="whole tokens per minute above 0"
    )


class ShadowCheck(Section):
    """Which greedy answers of pairs are computed again by the decode worker alone, and compared."""

    share: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = Field(
        default=0.002, description="the share of answers to check, from 0 to 1"
    )
    at_join: bool = Field(
        default=True, description="true to check a pair when it first serves, false not to"
    )
    exact: bool = Field(
        default=True,
        description="true where all workers compute the very same text, "
        "false where unlike hardware makes texts part after a while",
    )
    quarantine_s: Positive = Field(
        default=600.0, description="seconds above 0 without hand-offs for a pair that differs"
    )


class Admin(Section):
    """Who may use /admin."""

    key_env: KeyEnv


class Limits(Section):
    """Bounds of the router. Deadlines are those of one call to a worker."""

    max_body_bytes: Count = Field(default=32 << 20, description="a whole number of bytes above 0")
    queue: Count = Field(default=4096, description="a whole number of waiting requests above 0")
    attempts: Count = Field(default=3, description="a whole number of tries above 0")
    max_wait_s: Positive = Field(
        default=60.0, description="seconds above 0 a request may wait for a worker"
    )
    connect_s: Positive = Field(default=5.0, description="seconds above 0 to connect to a worker")
    first_byte_s: Positive = Field(
        default=300.0, description="seconds above 0 to a worker's first byte"
    )
    idle_s: Positive = Field(
        default=120.0, description="seconds above 0 between two bytes of an answer"
    )
    drain_s: Positive = Field(
        default=30.0, description="seconds above 0 to finish requests at shutdown"
    )
