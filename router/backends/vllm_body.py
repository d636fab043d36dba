"""The bodies of vLLM's requests: what a client may not say, what is said of a tenant, and the leg
that only prefills.

Protocol: vllm/entrypoints/openai/{completion,chat_completion}/protocol.py of vLLM 0.32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgspec

from router.backends.body import HANDOVER_FIELDS, fields_of, with_fields

_BATCH_PRIORITY = 10  # a lower number goes first, and 0 is what requests have that say nothing
_EXTRA = "vllm_xargs"
# Of no use to a leg whose one token nobody reads. Some of them forbid max_tokens 1 or a plain
# answer, some would be computed, and none of them changes the prompt.
_NOT_FOR_PREFILL = (
    "stream_options",
    "min_tokens",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "return_tokens_as_token_ids",
)
_KEPT_WHOLE = {
    "prompt_logprobs": "log-probabilities of the prompt need it computed where it is answered",
    "use_beam_search": "beam search asks the engine many times",
    "truncate_prompt_tokens": "where the prompt is cut depends on max_tokens",
}
_SET_TO_NOTHING = (b"null", b"false")


def why_not_split(body: bytes) -> str:
    """Return why a request cannot be prefilled apart by vLLM, or ""."""
    fields = fields_of(body)
    for name, reason in _KEPT_WHOLE.items():
        if bytes(fields.get(name, b"null")) not in _SET_TO_NOTHING:
            return f"{name}: {reason}"
    for name in ("n", "best_of"):
        if bytes(fields.get(name, b"null")) not in (b"null", b"0", b"1"):
            return f"{name}: each of several answers would fetch the KV, which is kept for one"
    return ""


def own_body(body: bytes, tenant: str, fields: Mapping[str, object], *, batch: bool) -> bytes:
    """Return the client's body with `fields` of ours; the same bytes where nothing changes.

    Hand-over fields of the client's own are taken out: one that is wrong ends the engine. `batch`
    adds a priority, a `tenant` a salt, so that no tenant's prompts show in another's timing.
    """
    known = fields_of(body)
    dropped = [name for name in HANDOVER_FIELDS if name in known]
    ours: dict[str, object] = {}
    extra = _clean_extra(known.get(_EXTRA))
    if extra is not None:
        ours[_EXTRA] = extra
    if tenant:
        dropped.append("priority")
        ours["cache_salt"] = cache_salt(tenant, bytes(known.get("cache_salt", b"")))
    if batch:
        ours["priority"] = _BATCH_PRIORITY
    ours.update(fields)
    changed = ours or any(name in known for name in dropped)
    return with_fields(body, ours, dropped) if changed else body


def prefill_body(body: bytes, fields: Mapping[str, object]) -> bytes:
    """Return a body (of `own_body`) for one token that nobody reads, and the same prompt."""
    ours = {"stream": False, "max_tokens": 1, **fields}
    if "max_completion_tokens" in fields_of(body):
        ours["max_completion_tokens"] = 1
    return with_fields(body, ours, _NOT_FOR_PREFILL)


def cache_salt(tenant: str, own_salt: bytes = b"") -> str:
    """Name a tenant's part of a prefix cache, the same at every worker and at every time.

    A salt of the client's own (as JSON) divides that part further.
    """
    name = tenant.encode()
    text = len(name).to_bytes(4, "big") + name + own_salt
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _clean_extra(raw: msgspec.Raw | None) -> dict[str, msgspec.Raw] | None:
    """Return `vllm_xargs` without hand-over fields, which vLLM would take from there too.

    None: nothing is to be changed.
    """
    if raw is None:
        return None
    try:
        extra = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        return None  # the engine will say what is wrong with it
    kept = {name: value for name, value in extra.items() if name not in HANDOVER_FIELDS}
    return kept if len(kept) < len(extra) else None
