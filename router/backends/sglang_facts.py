"""What an SGLang server says it was started with: `GET /server_info`, and `GET /v1/models`.

The first gives the server's arguments with defaults filled in, beside what the engine made of
them (`max_total_num_tokens`). Servers before 0.5 have it as `/get_server_info`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.backends.model_list import context_tokens, parse_models
from router.backends.probing import get_json
from router.origin import Origin
from router.upstream import Upstream
from router.wire import Headers

DEFAULT_BOOTSTRAP_PORT = 8998
_ASSUMED_RUNNING = 256
_MODES = ("null", "prefill", "decode")


class _Args(msgspec.Struct):
    """The fields read of `/server_info`. `disaggregation_mode` is what tells SGLang from others."""

    disaggregation_mode: str
    model_path: str
    served_model_name: str | None = None
    version: str | None = None
    disaggregation_bootstrap_port: int | None = None
    disaggregation_transfer_backend: str | None = None
    disaggregation_decode_allocation_policy: str | None = None
    page_size: int | None = None
    kv_cache_dtype: str | None = None
    hicache_mem_layout: str | None = None
    tp_size: int | None = None
    context_length: int | None = None
    max_running_requests: int | None = None
    max_total_num_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server. `mode` is its own --disaggregation-mode: null, prefill or decode."""

    mode: str = "null"
    model: str = ""
    bootstrap_port: int = DEFAULT_BOOTSTRAP_PORT
    transfer_backend: str = ""
    pairing_key: str = ""
    max_running: int = _ASSUMED_RUNNING
    kv_capacity_tokens: int = 0
    context_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def splits(self) -> bool:
        """It takes one side of hand-offs, and nothing else."""
        return self.mode != "null"


async def read_facts(upstream: Upstream, origin: Origin, headers: Headers) -> ServerFacts:
    """Ask a server. Raises ValueError when it is not SGLang, and UpstreamError."""
    args = await _args(upstream, origin, headers)
    if args.disaggregation_mode not in _MODES:
        raise ValueError(f"its disaggregation_mode {args.disaggregation_mode!r} is not known here")
    model = args.served_model_name or args.model_path
    context = args.context_length or 0
    if not context:
        status, body = await get_json(upstream, origin, b"/v1/models", headers)
        context = context_tokens(parse_models(body), model) if status == 200 else 0
    running, notes = args.max_running_requests or 0, [f"version {args.version or 'unknown'}"]
    if running <= 0:
        running = _ASSUMED_RUNNING
        notes.append(
            f"max_running {running} is assumed, since it does not tell; "
            "start it with --max-running-requests"
        )
    return ServerFacts(
        mode=args.disaggregation_mode,
        model=model,
        bootstrap_port=args.disaggregation_bootstrap_port or DEFAULT_BOOTSTRAP_PORT,
        transfer_backend=args.disaggregation_transfer_backend or "mooncake",
        pairing_key=_pairing_key(args),
        max_running=running,
        kv_capacity_tokens=max(0, args.max_total_num_tokens or 0),
        context_tokens=max(0, context),
        notes=tuple(notes),
    )


async def _args(upstream: Upstream, origin: Origin, headers: Headers) -> _Args:
    status, body = await get_json(upstream, origin, b"/server_info", headers)
    if status == 404:
        status, body = await get_json(upstream, origin, b"/get_server_info", headers)
    if status != 200:
        raise ValueError(f"GET /server_info answered {status}")
    try:
        return msgspec.json.decode(body, type=_Args)
    except msgspec.DecodeError as error:
        raise ValueError(f"GET /server_info: {error}") from error


def _pairing_key(args: _Args) -> str:
    """What both sides must share. Tensor-parallel sizes may differ."""
    fields = {
        "model": args.model_path,
        "page": args.page_size,
        "kv_dtype": args.kv_cache_dtype,
        "layout": args.hicache_mem_layout,
        "allocation": args.disaggregation_decode_allocation_policy,
        "version": args.version,
    }
    return ";".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: str | int | None) -> str:
    return "default" if value is None else str(value).replace(";", ",").replace("=", ":")
