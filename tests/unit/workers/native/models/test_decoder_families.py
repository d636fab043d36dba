"""Every family on tiny random weights, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.native.models.decoder import Decoder
from workers.native.models.dense_kv import DenseKv
from workers.native.models.errors import ContextLengthError, InvalidModelError
from workers.native.models.loading import load_decoder
from workers.native.models.weights import safetensors_files

transformers = pytest.importorskip("transformers")

SHAPE = {
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-odd-sizes": ("Llama", {"hidden_size": 40, "intermediate_size": 72, "vocab_size": 97}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", {"head_dim": 32}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": ("Llama", {"rope_parameters": LINEAR_ROPE}),
    "mistral-window": ("Mistral", {"sliding_window": 16, "head_dim": 16}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 16, "head_dim": 32, "query_pre_attn_scalar": 48,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    def make(class_name: str, options: dict[str, Any], **saving: Any) -> tuple[Path, Any]:
        config = getattr(transformers, f"{class_name}Config")(**SHAPE | options)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            for name, parameter in model.named_parameters():
                if name.endswith(("bias", "norm.weight")):
                    torch.nn.init.normal_(parameter, std=0.3)
                elif parameter.ndim == 2:
                    torch.nn.init.normal_(parameter, std=0.15)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder, **saving)
        return folder, model

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(
    family: str,
    make_model: Callable[..., tuple[Path, Any]],
    logits_of: Callable[[Decoder, Tensor, int], Tensor],
) -> None:
    folder, model = make_model(*FAMILIES[family])
    decoder = load_decoder(folder)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, decoder.config.vocab_size, (80,), generator=generator)
    with torch.no_grad():
        expected = model(ids[None]).logits[0]
    assert expected.abs().max() > 0.5
    assert (logits_of(decoder, ids, 80) - expected).abs().max() < 1e-4
    assert (logits_of(decoder, ids, 13) - expected).abs().max() < 1e-4
    assert (logits_of(decoder, ids, 1) - expected).abs().max() < 1e-4


def test_sharded_safetensors(
    make_model: Callable[..., tuple[Path, Any]], logits_of: Callable[[Decoder, Tensor, int], Tensor]
) -> None:
    whole, _ = make_model("Llama", {})
    sharded, _ = make_model("Llama", {}, max_shard_size="100KB")
    assert len(safetensors_files(sharded)) > 3
    ids = torch.arange(3, 30)
    same = logits_of(load_decoder(sharded), ids, 30)
    assert torch.equal(same, logits_of(load_decoder(whole), ids, 30))
    missing = safetensors_files(sharded)[1]
    missing.unlink()
    with pytest.raises(InvalidModelError, match=missing.name):
        load_decoder(sharded)


def test_only_asked_rows_are_computed(make_model: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = make_model("Llama", {})
    decoder = load_decoder(folder)
    ids, positions = torch.arange(5, 25), torch.arange(20)
    everything = decoder.forward(ids, positions, DenseKv(decoder.config, 20), torch.arange(20))
    rows = torch.tensor([19, 3])
    some = decoder.forward(ids, positions, DenseKv(decoder.config, 20), rows)
    assert torch.allclose(some, everything[rows], atol=1e-5)
    none = decoder.forward(ids, positions, DenseKv(decoder.config, 20), torch.arange(0))
    assert none.shape == (0, 192)
    assert some.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near(
    dtype: torch.dtype, make_model: Callable[..., tuple[Path, Any]]
) -> None:
    folder, _ = make_model(*FAMILIES["gemma3"])
    full, low = load_decoder(folder), load_decoder(folder, dtype=dtype)
    ids, positions = torch.arange(5, 25), torch.arange(20)
    expected = full.forward(ids, positions, DenseKv(full.config, 20), torch.arange(20))
    found = low.forward(ids, positions, DenseKv(low.config, 20, dtype), torch.arange(20))
    assert found.dtype == torch.float32
    assert low.weight_bytes_per_token == full.weight_bytes_per_token // 2
    correlation = torch.corrcoef(torch.stack((found.flatten(), expected.flatten())))[0, 1]
    assert correlation > 0.999


def test_weights_that_do_not_fit_the_config_are_named(
    make_model: Callable[..., tuple[Path, Any]],
    save_config: Callable[[Path, dict[str, Any]], None],
) -> None:
    folder, _ = make_model("Llama", {})
    save_config(folder, {"intermediate_size": 64})
    with pytest.raises(InvalidModelError, match=r"gate_proj.*\(128, 64\).*\(64, 64\)"):
        load_decoder(folder)
    save_config(folder, {"intermediate_size": 128, "num_hidden_layers": 4})
    with pytest.raises(InvalidModelError, match=r"model\.layers\.3\..*is missing"):
        load_decoder(folder)


def test_context_window_is_checked(make_model: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = make_model("Llama", {})
    decoder = load_decoder(folder)
    decoder.check_positions(255)
    with pytest.raises(ContextLengthError, match="256 tokens"):
        decoder.check_positions(256)
