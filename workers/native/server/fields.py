"""Request bodies: what is understood, what is refused by name, and the bounds of each field."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.native.sampling.params import SamplingParams
from workers.native.server.errors import ApiError, bad_request, unsupported

MAX_CHOICES = 16
MAX_LOGPROBS = 20
DEFAULT_COMPLETION_TOKENS = 16  # of OpenAI's completions; chat has none

# Harmless here: they steer billing, storage or identity, not the answer.
_IGNORED = {
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
    "return_token_ids",
    "add_special_tokens",
    "skip_special_tokens",
}
# Known fields with the value that means "not used"; any other value is refused by name.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": (),
    "suffix": ("",),
    "best_of": (1,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "structured_outputs": (),
    "grammar": ("",),
    "json_schema": (),
    "images": ([],),
    "use_beam_search": (False,),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "continue_final_message": (False,),
}

F = TypeVar("F", bound=BaseModel)
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class StreamOptions(BaseModel):
    """`stream_options` of the OpenAI API."""

    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = None


class GenerateFields(BaseModel):
    """Fields that chat and completions share. None means absent, as in the OpenAI API."""

    model_config = ConfigDict(strict=True, extra="allow")
    model: str
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings, however they were given."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_tokens: int, vocab_size: int, logprobs: int | None) -> SamplingParams:
        """Return the sampling wishes with defaults filled in. Draws a seed where none is given."""
        return SamplingParams(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=_biases(self.logit_bias, vocab_size),
            seed=secrets.randbits(64) if self.seed is None else self.seed & (2**64 - 1),
            stop=self.stops,
            stop_token_ids=_token_ids(self.stop_token_ids, vocab_size),
            ignore_eos=bool(self.ignore_eos),
            min_tokens=self.min_tokens or 0,
            max_tokens=max_tokens,
            logprobs=logprobs,
        )


class ChatFields(GenerateFields):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None

    @property
    def token_limit(self) -> int | None:
        """The newer name of the limit wins."""
        newer = self.max_completion_tokens
        return self.max_tokens if newer is None else newer


class CompletionFields(GenerateFields):
    """Body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [entry for entry in self.prompt if isinstance(entry, int)]
        return [ids] if ids else [entry for entry in self.prompt if not isinstance(entry, int)]


class TokenizeFields(BaseModel):
    """Body of `/tokenize`."""

    model_config = ConfigDict(strict=True, extra="ignore")
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool = True


def parse(kind: type[F], raw: bytes) -> F:
    """Read a body. Raises ApiError 400 that names the first field that is wrong."""
    try:
        fields = kind.model_validate_json(raw)
    except ValidationError as error:
        raise _explain(error) from error
    _refuse_extras(fields.model_extra or {})
    return fields


def _explain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    where = [str(part) for part in first["loc"]]
    param = where[0] if where else None
    if first["type"] == "missing":
        return bad_request(f"'{param}' is required", param, "missing_required_parameter")
    path = ".".join(part[:100] for part in where) or "the body"
    return bad_request(f"'{path}': {first['msg']}", param, "invalid_value")


def _refuse_extras(extra: dict[str, Any]) -> None:
    for name, value in extra.items():
        if value is None or name in _IGNORED:
            continue
        if name not in _REFUSED:
            shown = name[:100]
            raise bad_request(
                f"'{shown}' is not a field this engine knows; remove it", shown, "unknown_parameter"
            )
        if value not in _REFUSED[name]:
            raise unsupported(name, "remove it, or use a worker with another engine")


def _token_ids(given: list[int] | None, vocab_size: int) -> frozenset[int]:
    for token_id in given or ():
        if not 0 <= token_id < vocab_size:
            raise bad_request(
                f"'stop_token_ids': {token_id} is not a token id below {vocab_size}",
                "stop_token_ids",
            )
    return frozenset(given or ())


def _biases(given: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for key, bias in (given or {}).items():
        if not key.isdecimal() or len(key) > 9 or int(key) >= vocab_size:
            raise bad_request(
                f"'logit_bias': {key[:20]!r} is not a token id below {vocab_size}", "logit_bias"
            )
        biases[int(key)] = bias
    return biases
