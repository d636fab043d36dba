"""Writes a GGUF file as a Hugging Face-style folder, once, for every engine that reads those."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workers.native.models.gguf_file import GgufFile
from workers.native.models.gguf_tokenizer import build_tokenizer, special_tokens, tokenizer_config
from workers.native.models.gguf_weights import GgufWeights

ReportProgress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


def write_hf_folder(
    gguf_path: Path,
    out_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    on_progress: ReportProgress | None = None,
) -> Path:
    """Convert `gguf_path` into the folder `out_dir` that transformers and vLLM load; returns it.

    The folder appears whole or not at all: it is written beside its place and renamed. An existing
    `out_dir` is replaced. The default dtype is float32 because a dequantised weight is a product
    of a float16 scale and an integer plus an offset: rounding it to float16 or bfloat16 changes the
    logits, and then no engine would agree with the GGUF file to 1e-3. Disk space is the price.

    Raises InvalidModelError and UnsupportedModelError as `GgufFile` does.
    """
    file = GgufFile(gguf_path)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        _write_weights(file, building, dtype, on_progress)
        _write_tokenizer(file, building)
        config = file.hf_config(dtype)
        _write_json(building / "config.json", config)
        _write_json(building / "generation_config.json", _generation_config(file, config))
        building.chmod(0o755)
        if out_dir.exists():
            shutil.rmtree(out_dir)
        building.rename(out_dir)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return out_dir


def _write_weights(
    file: GgufFile, folder: Path, dtype: torch.dtype, on_progress: ReportProgress | None
) -> None:
    source = GgufWeights(file)
    names = sorted(source.names())
    tensors: dict[str, torch.Tensor] = {}
    for done, name in enumerate(names, start=1):
        tensors[name] = source.tensor(name).to(dtype)
        if on_progress is not None:
            on_progress(done, len(names))
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    build_tokenizer(file).save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file))
    _write_json(folder / "special_tokens_map.json", special_tokens(file))


def _generation_config(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    ends = [config["eos_token_id"], file.value("tokenizer.ggml.eot_token_id")]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "_from_model_config": True,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": distinct[0] if len(distinct) == 1 else distinct,
        "pad_token_id": config["pad_token_id"],
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
