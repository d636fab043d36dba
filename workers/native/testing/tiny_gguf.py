"""Small GGUF files, written the way llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

HEADS, KV_HEADS, HIDDEN, INTERMEDIATE, LAYERS = 4, 2, 64, 96, 2
GEMMA_HEAD_DIM = 32
CONTROL, USER_DEFINED, BYTE, NORMAL = 3, 4, 6, 1
TEXT = ("the quick brown fox jumps over the lazy dog, again and again. " * 20).split(" ")


def _permuted(matrix: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """`LlamaModel.permute` of convert_hf_to_gguf.py."""
    halves = matrix.reshape(heads, 2, matrix.shape[0] // heads // 2, *matrix.shape[1:])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def _layer_shapes(head_dim: int) -> dict[str, tuple[int, ...]]:
    return {
        "attn_q": (HEADS * head_dim, HIDDEN),
        "attn_k": (KV_HEADS * head_dim, HIDDEN),
        "attn_v": (KV_HEADS * head_dim, HIDDEN),
        "attn_output": (HIDDEN, HEADS * head_dim),
        "ffn_gate": (INTERMEDIATE, HIDDEN),
        "ffn_up": (INTERMEDIATE, HIDDEN),
        "ffn_down": (HIDDEN, INTERMEDIATE),
        "attn_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }


def _random_tensors(architecture: str, vocab_size: int) -> dict[str, NDArray[np.float32]]:
    """GGUF name to values, in Hugging Face convention (not permuted, norms as stored in GGUF)."""
    gemma = architecture == "gemma3"
    head_dim = GEMMA_HEAD_DIM if gemma else HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab_size, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    if not gemma:
        shapes["output.weight"] = (vocab_size, HIDDEN)
    for layer in range(LAYERS):
        names = dict(_layer_shapes(head_dim))
        if gemma:
            names |= {"attn_q_norm": (head_dim,), "attn_k_norm": (head_dim,)}
            names |= {"post_attention_norm": (HIDDEN,), "post_ffw_norm": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in names.items()}
    draw = np.random.default_rng(5)
    return {
        name: (1 if len(shape) == 1 else 0) + draw.normal(size=shape).astype(np.float32) * 0.2
        for name, shape in shapes.items()
    }


def write_gguf(
    path: Path,
    architecture: str,
    *,
    quantise: bool = False,
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, NDArray[np.float32]] | None = None,
    pre: str = "smollm",
) -> dict[str, NDArray[np.float32]]:
    """Write a file; returns its tensors in Hugging Face convention, dequantised."""
    writer = gguf.GGUFWriter(str(path), architecture)
    gemma = architecture == "gemma3"
    vocab_size = _add_gemma_tokens(writer) if gemma else _add_bpe_tokens(writer, pre)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if gemma:
        writer.add_key_length(GEMMA_HEAD_DIM)
        writer.add_value_length(GEMMA_HEAD_DIM)
        writer.add_sliding_window(16)
    for key, value in (extra or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    tensors = _random_tensors(architecture, vocab_size)
    stored = tensors | (extra_tensors or {})
    for name, values in stored.items():
        tensors[name] = _add_tensor(writer, name, values, architecture, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: NDArray[np.float32],
    architecture: str,
    quantise: bool,
) -> NDArray[np.float32]:
    kind = gguf.GGMLQuantizationType.Q8_0
    if quantise and values.ndim == 2:
        values = gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)
    written = values
    if architecture == "llama" and ".attn_q." in name:
        written = _permuted(values, HEADS)
    elif architecture == "llama" and ".attn_k." in name:
        written = _permuted(values, KV_HEADS)
    if quantise and values.ndim == 2:
        writer.add_tensor(name, gguf.quants.quantize(written, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, written)
    return values


def _add_bpe_tokens(writer: gguf.GGUFWriter, pre: str) -> int:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" ".join(TEXT)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens = ["<|end|>", "<|start|>", *learned]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL, CONTROL] + [NORMAL] * len(learned))
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}{{ eos_token }}")
    return len(tokens)


def _add_gemma_tokens(writer: gguf.GGUFWriter) -> int:
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    runs = ["\n", "\n\n", "  ", "   "]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["▁the", "▁qu", "ick", "the", "th", "he", "▁t", "ic", "▁q", "▁▁the"]
    letters = [*"▁abcdefghijklmnopqrstuvwxyzTé日"]
    tokens = special + runs + raw + words + letters
    kinds = [CONTROL] * 4 + [USER_DEFINED] * 4 + [BYTE] * 256
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * 264 + [-float(i) for i in range(len(words + letters))])
    writer.add_token_types(kinds + [NORMAL] * len(words + letters))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    return len(tokens)
