"""Reads a Hugging Face `config.json` (transformers 4 and 5 spellings) into a ModelConfig."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.native.models.config import Activation, ModelConfig, RopeSpec, RopeType
from workers.native.models.errors import InvalidModelError, UnsupportedModelError

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
SUPPORTED_ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3")
_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
# Options that change the mathematics and are not implemented; only these values are harmless.
_MUST_BE_OFF: Mapping[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (None, 0, 0.0),
    "final_logit_softcapping": (None, 0, 0.0),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "pretraining_tp": (None, 1),
}


@dataclass(frozen=True, slots=True)
class _Family:
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "gemma3_text": _Family(qk_norm=True, gemma=True),
}


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, for the end-of-text ids, `generation_config.json` of `folder`.

    Raises InvalidModelError for a missing or broken file and UnsupportedModelError for a model
    that asks for something not built here.
    """
    raw = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    extra = read_json(generation) if generation.is_file() else {}
    return model_config_from_dict(raw, extra)


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object; raises InvalidModelError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidModelError(
            f"{path} is missing: {path.parent} is not a complete model folder; pull the model again"
        ) from None
    except ValueError as error:
        raise InvalidModelError(
            f"{path} is not valid JSON ({error}); pull the model again"
        ) from error
    if not isinstance(value, dict):
        raise InvalidModelError(f"{path} holds no JSON object; pull the model again")
    return value


def model_config_from_dict(
    raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Build the ModelConfig from the parsed `config.json` (and `generation_config.json`)."""
    model_type = str(raw.get("model_type"))
    family = _FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModelError(
            f"model_type {model_type!r} is not supported by the native engine; "
            f"supported: {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    _refuse_unknown_options(raw)
    try:
        return _build(model_type, family, raw, generation or {})
    except KeyError as error:
        raise InvalidModelError(
            f"config.json of model_type {model_type!r} lacks {error}; use a complete model folder"
        ) from error


def _build(
    model_type: str, family: _Family, raw: Mapping[str, Any], generation: Mapping[str, Any]
) -> ModelConfig:
    hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or (256 if family.gemma else hidden // heads))
    context_tokens = int(raw["max_position_embeddings"])
    rope, local_rope = _ropes(raw, family, context_tokens)
    scalar = float(raw.get("query_pre_attn_scalar") or 256) if family.gemma else float(head_dim)
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=model_type,
        vocab_size=int(raw["vocab_size"]),
        layers=int(raw["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate=int(raw["intermediate_size"]),
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        local_rope=local_rope,
        windows=_windows(raw, model_type),
        max_context_tokens=context_tokens,
        attention_scale=scalar**-0.5,
        activation=_activation(raw, family),
        tie_embeddings=bool(raw.get("tie_word_embeddings", family.gemma)),
        bos_id=raw.get("bos_token_id"),
        eos_ids=_eos_ids(raw, generation),
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        sandwich_norms=family.gemma,
        norm_weight_offset=1.0 if family.gemma else 0.0,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
    )


def _refuse_unknown_options(raw: Mapping[str, Any]) -> None:
    for name, harmless in _MUST_BE_OFF.items():
        if raw.get(name) not in harmless:
            raise UnsupportedModelError(
                f"config.json sets {name}={raw[name]!r}, which the native engine lacks; "
                "serve this model with another engine"
            )


def _activation(raw: Mapping[str, Any], family: _Family) -> Activation:
    default = "gelu_pytorch_tanh" if family.gemma else "silu"
    name = str(raw.get("hidden_activation") or raw.get("hidden_act") or default)
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not supported by the native engine; "
            f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for source in (generation, raw):
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is not None and int(token) not in found:
                found.append(int(token))
    return tuple(found)


def _windows(raw: Mapping[str, Any], model_type: str) -> tuple[int | None, ...]:
    layers = int(raw["num_hidden_layers"])
    window = raw.get("sliding_window")
    if model_type.startswith("qwen") and not raw.get("use_sliding_window", False):
        window = None
    if window is None or model_type == "llama":
        return (None,) * layers
    kinds = raw.get("layer_types") or _layer_types(raw, model_type, layers)
    if len(kinds) != layers:
        raise InvalidModelError(
            f"config.json lists {len(kinds)} layer_types for {layers} layers; "
            "use a complete model folder"
        )
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(
                f"layer type {kind!r} is not supported by the native engine; "
                "supported: full_attention, sliding_attention"
            )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _layer_types(raw: Mapping[str, Any], model_type: str, layers: int) -> list[str]:
    if model_type == "gemma3_text":
        pattern = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
        full = [(layer + 1) % pattern == 0 for layer in range(layers)]
    elif model_type.startswith("qwen"):
        first = int(raw.get("max_window_layers", 28))
        full = [layer < first for layer in range(layers)]
    else:
        full = [False] * layers
    return ["full_attention" if is_full else "sliding_attention" for is_full in full]


def _ropes(
    raw: Mapping[str, Any], family: _Family, context_tokens: int
) -> tuple[RopeSpec, RopeSpec | None]:
    modern = raw.get("rope_parameters") or {}
    if family.gemma:
        full = modern.get("full_attention") or raw.get("rope_scaling") or {}
        local = modern.get("sliding_attention") or {}
        theta = float(raw.get("rope_theta") or 1_000_000.0)
        local_theta = float(raw.get("rope_local_base_freq") or 10_000.0)
        return (
            _rope_spec(full, theta, context_tokens),
            _rope_spec(local, local_theta, context_tokens),
        )
    scaling = modern or raw.get("rope_scaling") or {}
    return _rope_spec(scaling, float(raw.get("rope_theta") or 10_000.0), context_tokens), None


def _rope_spec(scaling: Mapping[str, Any], theta: float, context_tokens: int) -> RopeSpec:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    theta = float(scaling.get("rope_theta") or theta)
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "partial_rotary_factor other than 1 is not supported by the native engine; "
            "serve this model with another engine"
        )
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=float(scaling["factor"]))
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_context_tokens=int(
                scaling.get("original_max_position_embeddings") or context_tokens
            ),
        )
    raise UnsupportedModelError(
        f"rope type {kind!r} is not supported by the native engine; "
        f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
    )
