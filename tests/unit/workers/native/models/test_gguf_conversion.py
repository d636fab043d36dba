"""GGUF files: weights, configuration and folders, against what was written into them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from workers.native.models.config import RopeSpec
from workers.native.models.conversion import write_hf_folder
from workers.native.models.decoder import Decoder
from workers.native.models.errors import InvalidModelError, UnsupportedModelError
from workers.native.models.gguf_file import GgufFile
from workers.native.models.hf_config import read_model_config
from workers.native.models.loading import load_decoder
from workers.native.models.rope import inverse_frequencies
from workers.native.testing.tiny_gguf import HEADS, HIDDEN, write_gguf

IDS = torch.arange(4, 60)


@pytest.mark.parametrize("quantise", [False, True])
def test_llama_weights_come_back_exactly(tmp_path: Path, quantise: bool) -> None:
    written = write_gguf(tmp_path / "m.gguf", "llama", quantise=quantise)
    folder = write_hf_folder(tmp_path / "m.gguf", tmp_path / "hf")
    found = load_file(folder / "model.safetensors")
    pairs = {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "output.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.q_proj.weight": "blk.1.attn_q.weight",
        "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
        "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    }
    for name, stored in pairs.items():
        assert torch.equal(found[name], torch.from_numpy(written[stored])), name
    assert len(found) == len(written)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_every_way_to_load_gives_the_same_logits(
    architecture: str,
    tmp_path: Path,
    logits_of: Callable[[Decoder, Tensor, int], Tensor],
    reference: Callable[[Path], Any],
) -> None:
    write_gguf(tmp_path / "m.gguf", architecture)
    seen: list[tuple[int, int]] = []
    folder = write_hf_folder(
        tmp_path / "m.gguf", tmp_path / "hf", on_progress=lambda *at: seen.append(at)
    )
    assert seen[-1][0] == seen[-1][1] == len(seen)
    direct = logits_of(load_decoder(tmp_path / "m.gguf"), IDS, 100)
    assert torch.allclose(direct, logits_of(load_decoder(folder), IDS, 100), atol=1e-5)
    with torch.no_grad():
        expected = reference(folder)(IDS[None]).logits[0]
    assert (direct - expected).abs().max() < 1e-4


def test_the_folder_is_complete(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "gemma3")
    folder = write_hf_folder(tmp_path / "m.gguf", tmp_path / "deep" / "hf", dtype=torch.bfloat16)
    assert {path.name for path in folder.iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
        *("tokenizer_config.json", "special_tokens_map.json"),
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["torch_dtype"] == "bfloat16"
    assert config["rms_norm_eps"] == 1e-5
    assert read_model_config(folder).windows == (16, 16)
    assert load_file(folder / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    named = json.loads((folder / "special_tokens_map.json").read_text())
    assert named["bos_token"] == "<bos>"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["hf"]


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "llama")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_hf_folder(tmp_path / "m.gguf", tmp_path / "out" / "hf", on_progress=stop)
    assert list((tmp_path / "out").iterdir()) == []


def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    spec = RopeSpec(5000.0, "llama3", factor=8.0)
    dim = HIDDEN // HEADS
    divisors = inverse_frequencies(RopeSpec(5000.0), dim) / inverse_frequencies(spec, dim)
    tensors = {"rope_freqs.weight": divisors.numpy()}
    write_gguf(tmp_path / "m.gguf", "llama", extra_tensors=tensors)
    folder = write_hf_folder(tmp_path / "m.gguf", tmp_path / "hf")
    assert read_model_config(folder).rope == spec
    tensors["rope_freqs.weight"] = divisors.numpy() + 0.5
    write_gguf(tmp_path / "odd.gguf", "llama", extra_tensors=tensors)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        write_hf_folder(tmp_path / "odd.gguf", tmp_path / "odd")


def test_linear_rope_and_unknown_rope(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_gguf(tmp_path / "m.gguf", "llama", extra=linear)
    folder = write_hf_folder(tmp_path / "m.gguf", tmp_path / "hf")
    assert read_model_config(folder).rope == RopeSpec(5000.0, "linear", 4.0)
    write_gguf(tmp_path / "y.gguf", "llama", extra={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(UnsupportedModelError, match=r"'yarn'.*none, linear, llama3"):
        write_hf_folder(tmp_path / "y.gguf", tmp_path / "y")


def test_what_is_not_built_is_refused_by_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "f.gguf", "falcon")
    with pytest.raises(UnsupportedModelError, match=r"'falcon'.*llama, qwen2, qwen3, gemma3"):
        GgufFile(tmp_path / "f.gguf")
    write_gguf(tmp_path / "x.gguf", "llama", extra={"llama.expert_count": 8})
    with pytest.raises(UnsupportedModelError, match="mixture-of-experts"):
        load_decoder(tmp_path / "x.gguf")
    write_gguf(tmp_path / "p.gguf", "llama", pre="chameleon")
    with pytest.raises(UnsupportedModelError, match=r"'chameleon'.*smollm"):
        write_hf_folder(tmp_path / "p.gguf", tmp_path / "p")
    (tmp_path / "no.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(InvalidModelError, match=r"no\.gguf is not a readable GGUF"):
        load_decoder(tmp_path / "no.gguf")
    with pytest.raises(InvalidModelError, match="does not exist"):
        load_decoder(tmp_path / "absent")
