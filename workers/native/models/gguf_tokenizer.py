"""Rebuilds the `tokenizers` tokenizer that a GGUF file describes.

A GGUF holds vocabulary, token types and (byte-level BPE only) merges; normaliser, pre-tokenizer and
decoder follow from `tokenizer.ggml.model` and `tokenizer.ggml.pre`. The pre-tokenizer patterns are
those of llama.cpp (`src/llama-vocab.cpp`) and of the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from workers.native.models.errors import InvalidModelError, UnsupportedModelError
from workers.native.models.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLITS: Mapping[str, str] = {
    "llama-bpe": _LLAMA3_SPLIT,
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
}
_SUPPORTED_PRE = ("default", "gpt-2", "smollm", *_SPLITS)


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The file's tokenizer, special tokens and BOS rule included.

    Raises UnsupportedModelError for a tokenizer model or pre-tokenizer that is not known.
    """
    kind = file.value("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(file)
    elif kind == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise UnsupportedModelError(
            f"{file.path}: GGUF tokenizer {kind!r} is not supported; supported: gpt2, llama"
        )
    _add_marked_tokens(tokenizer, file)
    if file.value("tokenizer.ggml.add_bos_token", kind == "llama"):
        tokenizer.post_processor = _bos_processor(file)
    return tokenizer


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The tokenizer_config.json that belongs to `build_tokenizer`."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(file.value(f"{file.architecture}.context_length")),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(
            file.value(
                "tokenizer.ggml.add_bos_token", file.value("tokenizer.ggml.model") == "llama"
            )
        ),
        **special_tokens(file),
    }
    template = file.value("tokenizer.chat_template")
    if template:
        config["chat_template"] = str(template)
    return config


def special_tokens(file: GgufFile) -> dict[str, str]:
    """special_tokens_map.json: bos, eos, unk and pad token where the file has them."""
    tokens = _vocabulary(file)
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    found = {name: file.value(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return {f"{name}_token": tokens[index] for name, index in found.items() if index is not None}


def _byte_level(file: GgufFile) -> Tokenizer:
    merges = file.value("tokenizer.ggml.merges")
    if merges is None:
        raise InvalidModelError(
            f"{file.path} lacks tokenizer.ggml.merges; download a complete GGUF file"
        )
    pairs = [_pair(str(merge)) for merge in merges]
    tokenizer = Tokenizer(BPE(vocab=_ids(_vocabulary(file)), merges=pairs))
    pre = str(file.value("tokenizer.ggml.pre", "default"))
    tokenizer.pre_tokenizer = _pre_tokenizer(file, pre)
    if _SPLITS.get(pre) == _QWEN2_SPLIT:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right


def _pre_tokenizer(file: GgufFile, pre: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in {"default", "gpt-2"}:
        return words
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, words])
    if pre not in _SPLITS:
        raise UnsupportedModelError(
            f"{file.path}: GGUF pre-tokenizer {pre!r} is not supported; "
            f"supported: {', '.join(_SUPPORTED_PRE)}"
        )
    split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, as_bytes])


def _sentencepiece(file: GgufFile) -> Tokenizer:
    gemma = file.architecture.startswith("gemma")
    tokens = _vocabulary(file)
    # Gemma's scores do not follow its merge order, the position in the vocabulary does.
    ranks: Sequence[float] = (
        range(len(tokens))
        if gemma
        else [-float(score) for score in file.value("tokenizer.ggml.scores")]
    )
    model = BPE(
        vocab=_ids(tokens),
        merges=sentencepiece_merges(tokens, ranks),
        unk_token=special_tokens(file).get("unk_token", "<unk>"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(file.value("tokenizer.ggml.add_space_prefix", not gemma))
    visible = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), visible]) if prefix else visible
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def sentencepiece_merges(tokens: Sequence[str], ranks: Sequence[float]) -> list[tuple[str, str]]:
    """The BPE merges that a SentencePiece vocabulary implies, best first.

    Every way to cut a token into two tokens is a merge; a lower `ranks[i]` merges first, and of one
    token's cuts the longer left part (as transformers' `generate_merges`).
    """
    ids = _ids(tokens)
    return [pair for _, pair in sorted(_cuts(tokens, ids, ranks), key=lambda cut: cut[0])]


def _cuts(
    tokens: Sequence[str], ids: Mapping[str, int], ranks: Sequence[float]
) -> Iterator[tuple[tuple[float, int, int], tuple[str, str]]]:
    for token, rank in zip(tokens, ranks, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                yield (rank, -len(left), -len(right)), (left, right)


def _vocabulary(file: GgufFile) -> list[str]:
    tokens = file.value("tokenizer.ggml.tokens")
    if not tokens:
        raise InvalidModelError(
            f"{file.path} lacks tokenizer.ggml.tokens; download a complete GGUF file"
        )
    if file.value("tokenizer.ggml.model") != "llama":
        return [str(token) for token in tokens]
    # Runs of spaces are stored as they are, but the normaliser looks them up in visible form.
    return [_SPACE * len(t) if len(t) > 1 and not t.strip(" ") else t for t in tokens]


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _add_marked_tokens(tokenizer: Tokenizer, file: GgufFile) -> None:
    types = file.value("tokenizer.ggml.token_type") or []
    stored = file.value("tokenizer.ggml.tokens")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in zip(stored, types, strict=False)
            if kind == _CONTROL
        ]
    )
    # Matched whole in the text, but part of what is shown. Runs of spaces are left to the merges.
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in zip(stored, types, strict=False)
            if kind == _USER_DEFINED and token.strip(" ")
        ]
    )


def _bos_processor(file: GgufFile) -> processors.PostProcessor:
    bos = special_tokens(file).get("bos_token")
    if bos is None:
        raise InvalidModelError(
            f"{file.path} asks for a BOS token but names none; download a complete GGUF file"
        )
    index = int(file.value("tokenizer.ggml.bos_token_id"))
    return processors.TemplateProcessing(
        single=f"{bos}:0 $A:0",
        pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
        special_tokens=[(bos, index)],
    )
