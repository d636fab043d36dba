"""config.json in its spellings, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.native.models.config import RopeSpec
from workers.native.models.errors import InvalidModelError, UnsupportedModelError
from workers.native.models.hf_config import model_config_from_dict, read_model_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
GEMMA = LLAMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "head_dim": 32,
    "sliding_window": 128,
    "query_pre_attn_scalar": 64,
}


def test_both_spellings_of_rope_agree() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = model_config_from_dict(LLAMA | {"rope_theta": 1e5, "rope_scaling": scaling})
    new = model_config_from_dict(LLAMA | {"rope_parameters": scaling | {"rope_theta": 1e5}})
    assert old == new
    assert old.rope == RopeSpec(1e5, "linear", 4.0)
    legacy = {"type": "linear", "factor": 4.0}
    assert model_config_from_dict(LLAMA | {"rope_theta": 1e5, "rope_scaling": legacy}) == old


def test_gemma_windows_and_ropes() -> None:
    old = model_config_from_dict(
        GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    )
    assert old.windows == (128, 128, 128, 128, 128, None, 128)
    assert [old.rope_of(layer).theta for layer in (4, 5)] == [1e4, 1e6]
    assert old.attention_scale == 64**-0.5
    assert old.embedding_scale == 8.0
    assert old.tie_embeddings
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    new = model_config_from_dict(GEMMA | {"rope_parameters": ropes})
    assert new.rope == RopeSpec(1e6, "linear", 8.0)
    assert new.local_rope == RopeSpec(1e4)


def test_sliding_windows_of_the_other_families() -> None:
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 64}
    assert model_config_from_dict(mistral).windows == (64,) * 4
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 3}
    assert model_config_from_dict(qwen).windows == (None,) * 4
    used = model_config_from_dict(qwen | {"use_sliding_window": True})
    assert used.windows == (None, None, None, 64)
    assert used.qkv_bias


def test_end_ids_of_both_files_in_order(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_config(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert read_model_config(tmp_path).eos_ids == (7, 2)


def test_sizes() -> None:
    config = model_config_from_dict(LLAMA)
    assert config.layer_parameters == 64 * 64 * 4 + 3 * 64 * 96
    assert config.matrix_parameters == 4 * config.layer_parameters + 6400
    assert config.kv_bytes_per_token == 2 * 4 * 4 * 16 * 4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "mamba"}, ["'mamba'", "supported", "llama", "gemma3_text"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ["'yarn'", "default, linear"]),
        ({"hidden_act": "relu"}, ["'relu'", "silu"]),
        ({"final_logit_softcapping": 30.0}, ["final_logit_softcapping=30.0"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
    ],
)
def test_what_is_not_built_is_refused_by_name(change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        model_config_from_dict(LLAMA | change)
    for word in words:
        assert word in str(caught.value)


def test_unknown_layer_type() -> None:
    kinds = ["full_attention", "chunked_attention", "full_attention", "full_attention"]
    mistral = LLAMA | {"model_type": "mistral", "sliding_window": 64, "layer_types": kinds}
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        model_config_from_dict(mistral)
    with pytest.raises(InvalidModelError, match="3 layer_types for 4"):
        model_config_from_dict(mistral | {"layer_types": kinds[:1] * 3})


def test_incomplete_or_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"config\.json is missing"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidModelError, match="not valid JSON"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InvalidModelError, match="no JSON object"):
        read_model_config(tmp_path)
    short = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
    with pytest.raises(InvalidModelError, match="hidden_size"):
        model_config_from_dict(short)
