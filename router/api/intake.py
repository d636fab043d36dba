"""From an HTTP request to a `GenerateRequest`: reads only the fields the router owns.

The body itself is passed on as it came. A field the router does not know is none of its business.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import xxhash

from router.api.errors import ApiError
from router.form_data import boundary_of, find_field
from router.settings import RouterSettings, ServiceClass
from splitserve.messages import GenerateRequest, PlanKind, Slo

_BYTES_PER_TOKEN = 4  # an estimate until a worker reports the true count
HASH_BLOCK_BYTES = 2048
_TRUE = (b"1", b"true")
_SLO_HEADERS = {
    b"x-slo-ttft-ms": "ttft_s",
    b"x-slo-tpot-ms": "tpot_s",
    b"x-slo-deadline-ms": "deadline_s",
    b"x-llm-d-slo-ttft-ms": "ttft_s",
    b"x-llm-d-slo-tpot-ms": "tpot_s",
}
_TIERS = {"flex": "batch", "priority": "interactive"}


class Fields(msgspec.Struct):
    """What the router reads of a body. Everything else is checked for syntax and skipped."""

    model: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    stream: bool | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    echo: bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    service_tier: str | None = None
    logprobs: bool | int | None = None


JSON, FORM = b"application/json", b"multipart/form-data"
_LONGEST_MODEL = 512
_SEVERAL = "several prompts in one body"
_NOT_EMPTY_LIST = re.compile(rb"\[\s*[^\s\]]")
_DECODER = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, slots=True)
class Intake:
    """A request that was understood."""

    request: GenerateRequest
    stream: bool


def read(
    path: str,
    body: bytes,
    headers: Mapping[bytes, bytes],
    settings: RouterSettings,
    *,
    request_id: str,
    tenant: str = "",
    tenant_weight: float = 1.0,
) -> Intake:
    """Understand a request. Raises ApiError 400 that names the field and the mend."""
    form = content_kind(headers) == FORM
    fields = _decode_form(body, headers) if form else _decode(body)
    _require(path, fields)
    wanted = fields.max_completion_tokens
    service_class = _service_class(fields, headers, settings)
    tokens, estimate = _prompt_tokens(fields)
    own_class = settings.classes[service_class]
    unsplittable = _unsplittable(path, fields)
    request = GenerateRequest(
        request_id=request_id,
        model=fields.model,
        prompt_tokens=tokens,
        prompt_is_estimate=estimate,
        streamed=bool(fields.stream),
        fail_fast=own_class.fail_fast or headers.get(b"x-slo-fail-fast") in _TRUE,
        block_hashes=prompt_hashes(_prompt_of(fields), tenant),
        hash_block_tokens=HASH_BLOCK_BYTES // _BYTES_PER_TOKEN,
        max_tokens=fields.max_tokens if wanted is None else wanted,
        service_class=service_class,
        tenant=tenant,
        tenant_weight=tenant_weight,
        slo=_slo(own_class, headers),
        session=headers.get(b"x-session-id", b"").decode("latin-1")[:256],
        unsplittable=unsplittable,
        several_prompts=unsplittable == _SEVERAL,
        forced_plan=_forced_plan(headers),
        forced_worker=_text(headers, b"x-splitserve-worker"),
    )
    return Intake(request, bool(fields.stream))


def content_kind(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the media type of a request, in lower case; JSON where it is not said."""
    return headers.get(b"content-type", JSON).partition(b";")[0].strip().lower()


def _decode_form(body: bytes, headers: Mapping[bytes, bytes]) -> Fields:
    """Read a form, as uploads of audio are. Its parts are the engine's matter but for two."""
    try:
        boundary = boundary_of(headers[b"content-type"])
        if boundary is None:
            raise ValueError("its content-type names no boundary")
        model, stream = (find_field(body, boundary, name) for name in (b"model", b"stream"))
        name = model.value.decode() if model is not None else ""
    except ValueError as error:
        raise ApiError(400, f"the form is not valid: {error}", code="invalid_form") from error
    if not 0 < len(name) <= _LONGEST_MODEL:
        message = f"the form needs a field 'model' of at most {_LONGEST_MODEL} characters"
        raise ApiError(400, message, code="missing_required_parameter", param="model")
    return Fields(name, stream=stream is not None and stream.value.lower() in _TRUE)


def _decode(body: bytes) -> Fields:
    try:
        if not body.isascii():
            body.decode()  # what is skipped below is not checked, and engines trip over it
        return _DECODER.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        param = message.rpartition("$.")[2].rstrip("`") if "$." in message else None
        if "missing required field" in message:
            param = message.split("`")[1]
        raise ApiError(
            400, f"the body is wrong: {message}", code="invalid_value", param=param
        ) from (error)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"the body is not valid JSON: {error}"
        raise ApiError(400, detail, code="invalid_json") from error


def _require(path: str, fields: Fields) -> None:
    name = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}.get(path)
    if name is None:
        return
    raw = getattr(fields, name)
    if bytes(memoryview(raw)[:5]) in (b"", b"null"):
        raise ApiError(400, f"'{name}' is required", code="missing_required_parameter", param=name)
    if name == "messages" and not _NOT_EMPTY_LIST.match(raw):
        message = "'messages' must be a list with at least one message"
        raise ApiError(400, message, code="invalid_value", param=name)


def _prompt_tokens(fields: Fields) -> tuple[int, bool]:
    """Return prompt tokens and whether they are a guess."""
    raw = _prompt_of(fields)
    if bytes(raw[:1]) == b"[" and bytes(raw[1:64]).lstrip()[:1].isdigit():
        return bytes(raw).count(b",") + 1, False  # token ids
    return max(1, len(raw) // _BYTES_PER_TOKEN), True


def _prompt_of(fields: Fields) -> memoryview:
    """The prompt as it lies in the body; not copied, it may be long."""
    for raw in (fields.prompt, fields.messages):
        if (prompt := memoryview(raw)).nbytes:
            return prompt
    return memoryview(fields.input)


def prompt_hashes(raw: memoryview, tenant: str) -> tuple[int, ...]:
    """Chained hashes of whole blocks of a prompt's bytes, so that equal hashes mean equal prefixes.

    Seeded by the tenant: no tenant's prompts tell anything of another's.
    """
    digest = xxhash.xxh3_64_intdigest(tenant.encode())
    found: list[int] = []
    for start in range(0, len(raw) - HASH_BLOCK_BYTES + 1, HASH_BLOCK_BYTES):
        digest = xxhash.xxh3_64_intdigest(raw[start : start + HASH_BLOCK_BYTES], digest)
        found.append(digest)
    return tuple(found)


def _unsplittable(path: str, fields: Fields) -> str:
    if path not in ("/v1/chat/completions", "/v1/completions"):
        return f"{path} is not a generation"
    if fields.echo and fields.logprobs is not None:
        return "echo with logprobs needs the prompt computed where it is answered"
    raw = memoryview(fields.prompt)
    if bytes(raw[:1]) == b"[":
        inner = bytes(raw[1:64]).lstrip()[:1]
        if inner == b"[" or (inner == b'"' and _is_several(fields.prompt)):
            return _SEVERAL
    return ""


def _is_several(raw: msgspec.Raw) -> bool:
    return len(msgspec.json.decode(raw, type=list[msgspec.Raw])) > 1


def _service_class(fields: Fields, headers: Mapping[bytes, bytes], settings: RouterSettings) -> str:
    asked = _text(headers, b"x-slo-class")
    if asked is None:
        tier = _TIERS.get(fields.service_tier or "", "")
        return tier if tier in settings.classes else settings.default_class
    if asked not in settings.classes:
        known = ", ".join(settings.classes)
        message = f"header x-slo-class: no class {asked[:60]!r}; known are {known}"
        raise ApiError(400, message, code="unknown_class", param="x-slo-class")
    return asked


def _slo(service_class: ServiceClass, headers: Mapping[bytes, bytes]) -> Slo:
    targets = {
        "ttft_s": _seconds(service_class.ttft_ms),
        "tpot_s": _seconds(service_class.tpot_ms),
        "deadline_s": _seconds(service_class.deadline_ms) or service_class.deadline_s,
    }
    for name, field in _SLO_HEADERS.items():
        value = headers.get(name)
        if value is not None:
            targets[field] = _milliseconds(name.decode(), value) / 1e3
    return Slo(**targets)


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _milliseconds(name: str, value: bytes) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e10:
        message = f"header {name}: {value[:40]!r} is not a number of milliseconds above 0"
        raise ApiError(400, message, code="invalid_header", param=name)
    return number


def _forced_plan(headers: Mapping[bytes, bytes]) -> PlanKind | None:
    asked = _text(headers, b"x-splitserve-plan")
    if asked in (None, "auto"):
        return None
    if asked not in tuple(PlanKind):
        message = f"header x-splitserve-plan: {asked[:40]!r}; say auto, aggregated or disaggregated"
        raise ApiError(400, message, code="invalid_header", param="x-splitserve-plan")
    return PlanKind(asked)


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")
