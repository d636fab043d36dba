"""What travels from vLLM's prefill leg to its decode leg, and what the first leg's answer says."""

from __future__ import annotations

import msgspec

NONE = msgspec.Raw(b"null")
_LONGEST_MARGIN_S = 10.0


class Claim(msgspec.Struct, omit_defaults=True):
    """A `Handoff`'s attributes, as JSON. Times are on the router's clock; 0: there is no lease.

    `request_id` goes with both legs. `promised_tokens` of the prompt need not be computed by the
    decode worker; None: all of it, whatever its length. `stamp_s` is when the KV was complete, or
    before that. Of `folder`, `token_ids`, `block_tokens` and `prompt_tokens` a converter of
    example files makes its own: the ids are what was prefilled, the first of them the prompt's
    (None: all).
    """

    request_id: str
    promised_tokens: int | None = None
    stamp_s: float = 0.0
    lease_s: float = 0.0
    kv: msgspec.Raw = NONE
    folder: str = ""
    token_ids: list[int] = []
    block_tokens: int = 0
    prompt_tokens: int | None = None

    @property
    def engine_id(self) -> str:
        """The prefill engine, where `kv` names one: another process has another id."""
        engine: _Engine | None = msgspec.json.decode(self.kv, type=_Engine | None)
        return engine.remote_engine_id if engine is not None else ""

    @property
    def send_by_s(self) -> float:
        """When the decode leg must have been sent: with time left for its worker to see it."""
        return self.stamp_s + self.lease_s - min(_LONGEST_MARGIN_S, self.lease_s / 3)


class _Engine(msgspec.Struct):
    remote_engine_id: str


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class PrefillAnswer(msgspec.Struct):
    """What is read of the first leg's answer. Chats have the prompt's ids at the top level."""

    usage: _Usage | None = None
    kv_transfer_params: msgspec.Raw = NONE
    choices: list[_Choice] = []
    prompt_token_ids: list[int] | None = None

    @property
    def prompt_tokens(self) -> int:
        """The prompt's length."""
        return self.usage.prompt_tokens if self.usage else 0

    @property
    def cached_tokens(self) -> int:
        """How many of them the prefill worker had already, as far as it tells."""
        if bytes(self.kv_transfer_params) != bytes(NONE):
            told = msgspec.json.decode(self.kv_transfer_params, type=_Cached)
            return told.remote_prefill_cached_tokens or 0
        details = self.usage.prompt_tokens_details if self.usage else None
        return details.cached_tokens or 0 if details else 0

    def token_ids(self) -> list[int]:
        """The prompt's ids; none where they were not asked for."""
        if self.prompt_token_ids is not None:
            return self.prompt_token_ids
        return self.choices[0].prompt_token_ids or [] if self.choices else []


class _Cached(msgspec.Struct):
    remote_prefill_cached_tokens: int | None = None
