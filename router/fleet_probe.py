"""What `splitserve probe` finds out: engines, speeds, and what stands in the way.

Workers are asked all at once, and measured one after another: two of them may share a machine.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from router.backends.base import Backend, Target, WorkerOptions
from router.backends.detect import Dialect, UnknownEngine, detect
from router.backends.probing import get_json
from router.backends.speed_probe import CannotMeasure, Speeds, measure
from router.backends.version import engine_version
from router.errors import ClosedEarly, ConnectFailed, Malformed, ProbeFailed, UpstreamError
from router.origin import Origin
from router.upstream import Upstream
from router.wire import Deadlines
from splitserve.messages import Role, WorkerSnapshot

MEASURE_S = 300.0  # a server may load the model first
_DEADLINES = Deadlines(connect_s=5.0, first_byte_s=MEASURE_S, idle_s=60.0)
_ROUND_TRIPS = 3
_WANTS_KEY = (401, 403)
_KEY_REFUSED = tuple(f"HTTP {status}" for status in _WANTS_KEY)


@dataclass(frozen=True, slots=True)
class Address:
    """One worker to probe. `name` is what people know it by."""

    name: str
    origin: Origin
    options: WorkerOptions
    role: Role = Role.AUTO


@dataclass(frozen=True, slots=True)
class Found:
    """One worker as it was found. Speeds that were measured are in `snapshot` too."""

    address: Address
    snapshot: WorkerSnapshot
    version: str
    round_trip_s: float
    speeds: Speeds | None = None
    why_no_speeds: str = ""
    why_no_handoff: str = ""


_HANDOFF_MENDS = {
    "vllm": "no connector is known: add kv=nixl-pull or what its --kv-transfer-config says",
    "sglang": "it was started without --disaggregation-mode",
}


async def probe_fleet(
    addresses: Iterable[Address],
    dialects: Iterable[Dialect],
    upstream: Upstream,
    *,
    with_speeds: bool,
    on_step: Callable[[str], None] = lambda name: None,
) -> list[Found | ProbeFailed]:
    """Probe every address; results in their order. `on_step` hears which is being measured."""
    known = list(addresses)
    dialects = tuple(dialects)
    seen = await asyncio.gather(*(_ask(each, dialects, upstream) for each in known))
    results: list[Found | ProbeFailed] = []
    for each in seen:
        if isinstance(each, ProbeFailed):
            results.append(each)
            continue
        backend, found = each
        if with_speeds:
            on_step(found.address.name)
            results.append(await _measured(backend, found))
        else:
            results.append(found)
    return results


async def _ask(
    address: Address, dialects: Iterable[Dialect], upstream: Upstream
) -> tuple[Backend, Found] | ProbeFailed:
    target = Target(address.name, address.origin, address.role, address.options)
    try:
        round_trip_s = await _round_trip(address, upstream)
        backend, snapshot = await detect(dialects, target, upstream, _DEADLINES)
        snapshot = _only(address, snapshot)
        headers = address.options.headers
        version = await engine_version(upstream, address.origin, headers, snapshot)
    except ProbeFailed as error:
        return error
    except UpstreamError as error:
        return _unreachable(address, error)
    except UnknownEngine as error:
        cause = f"no LLM server answers there ({error.last_reason})"
        return ProbeFailed(address.origin.url, cause, "check host, port and base path")
    why_whole = _why_whole(backend, snapshot)
    return backend, Found(address, snapshot, version, round_trip_s, why_no_handoff=why_whole)


def _why_whole(backend: Backend, snapshot: WorkerSnapshot) -> str:
    """Why a worker takes no part in hand-offs, in its dialect's words where it has some."""
    if snapshot.connector:
        return ""
    said: object = getattr(backend, "why_whole", "")
    known = said if isinstance(said, str) else ""
    return known or _HANDOFF_MENDS.get(snapshot.engine, f"{snapshot.engine} has no way to move KV")


async def _round_trip(address: Address, upstream: Upstream) -> float:
    """Seconds of the quickest small question. Raises ProbeFailed for a key that is refused."""
    now_s = asyncio.get_running_loop().time
    quickest_s = float("inf")
    for _ in range(_ROUND_TRIPS):
        begun_s = now_s()
        headers = address.options.headers
        status, _ = await get_json(upstream, address.origin, b"/v1/models", headers)
        quickest_s = min(quickest_s, now_s() - begun_s)
        if status in _WANTS_KEY:
            raise _key_refused(address, status)
    return quickest_s


def _only(address: Address, snapshot: WorkerSnapshot) -> WorkerSnapshot:
    """Keep the model that was asked for. Raises ProbeFailed when it is not there."""
    wanted = address.options.model
    if not wanted or wanted in snapshot.models:
        return replace(snapshot, models=(wanted,)) if wanted else snapshot
    known = ", ".join(snapshot.models) or "no model"
    mend = "name one of these, or its own name with engine_model=..."
    raise ProbeFailed(address.origin.url, f"it serves {known}, not {wanted}", mend)


async def _measured(backend: Backend, found: Found) -> Found | ProbeFailed:
    snapshot = found.snapshot
    if snapshot.splits_only:
        return replace(
            found, why_no_speeds="it takes one side of hand-offs and answers nobody alone"
        )
    if len(snapshot.models) != 1:
        why = f"it has {len(snapshot.models)} models; choose one with model=NAME"
        return replace(found, why_no_speeds=why)
    try:
        async with asyncio.timeout(MEASURE_S):
            speeds = await measure(backend, snapshot.models[0])
    except (UpstreamError, CannotMeasure, TimeoutError) as error:
        said = str(error) or f"no answer within {MEASURE_S:g} s"
        if said.startswith(_KEY_REFUSED):
            return _key_refused(found.address, int(said.split()[1].rstrip(":")))
        return replace(found, why_no_speeds=said)
    measured = replace(
        snapshot,
        prefill_tok_s=speeds.prefill_tok_s or snapshot.prefill_tok_s,
        decode_tok_s=speeds.decode_tok_s or snapshot.decode_tok_s,
    )
    return replace(found, snapshot=measured, speeds=speeds)


def _key_refused(address: Address, status: int) -> ProbeFailed:
    given = bool(address.options.headers)
    cause = (
        f"it refuses the key that was sent ({status})" if given else f"it wants a key ({status})"
    )
    mend = "name the environment variable that holds its key with --key-env NAME"
    return ProbeFailed(address.origin.url, cause, mend)


def _unreachable(address: Address, error: UpstreamError) -> ProbeFailed:
    """Say what to do about it; where TLS is the trouble, somebody is there."""
    mend, tls = error.mend, address.origin.tls
    match error, error.__cause__:
        case _, ssl.SSLCertVerificationError():
            mend = "let SSL_CERT_FILE name the certificate that signs it, or write its real name"
        case _, ssl.SSLError():
            mend = "write http:// if it speaks no TLS, or mend its TLS"
        case ConnectFailed(), ConnectionResetError() if tls:
            mend = "write http:// if it speaks no TLS, or read its log"
        case ((ClosedEarly() | Malformed()), _) if not tls:
            mend = "write https:// if it speaks TLS, or name the port of its HTTP server"
        case _:
            pass
    return ProbeFailed(address.origin.url, error.cause, mend)
