"""A model folder of a few hundred kilobytes: random weights, byte tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from workers.native.models.hf_config import model_config_from_dict
from workers.native.models.token_pieces import byte_alphabet
from workers.native.models.weights import expected_shapes

END = "<|end|>"
_WORDS = ("the", "and", "cat", "dog", "house", "tree", "blue", "sun", "\N{SNOWMAN}", "42")
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_folder(folder: Path, *, seed: int = 0, context_tokens: int = 256) -> Path:
    """Write config, weights and tokenizer of a 2-layer Llama into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    config = _config(tokenizer, context_tokens)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(_weights(config, seed), str(folder / "model.safetensors"))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"eos_token": END, "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


def _tokenizer() -> FastTokenizer:
    """Every byte is a token; the words are tokens too, which only a model writes."""
    alphabet = byte_alphabet()
    spelled = {byte: character for character, byte in alphabet.items()}
    words = ["".join(spelled[b] for b in f" {word}".encode()) for word in _WORDS]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *words])}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, "<|user|>", "<|system|>", "<|assistant|>"])
    return tokenizer


def _config(tokenizer: FastTokenizer, context_tokens: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.token_to_id(END),
        "torch_dtype": "float32",
    }


def _weights(config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=draw) * (shape[1] ** -0.5)
        for name, shape in expected_shapes(model_config_from_dict(config)).items()
    }
    weights["model.embed_tokens.weight"] *= 3
    head = weights["lm_head.weight"]
    head *= 2.5  # decided answers: a near tie would turn on the last bit of a sum
    for token_id, byte in enumerate(byte_alphabet().values()):
        if not 32 <= byte < 127:  # mostly readable text, and now and then a stray byte
            head[token_id] *= 0.3
    return weights
