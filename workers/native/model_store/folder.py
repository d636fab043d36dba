"""A resolved model: a folder that every engine can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workers.native.models.errors import InvalidModelError
from workers.native.models.hf_config import read_json

Source = Literal["folder", "gguf", "cache", "hub", "package"]


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`path` holds config.json, tokenizer.json and safetensors weights; `source` says whence."""

    name: str
    path: Path
    source: Source
    licence: str | None = None


def missing_file(folder: Path) -> str | None:
    """The first file that `folder` lacks to be a complete model, or None when it is complete."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            return name
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = read_json(index).get("weight_map", {}).values()
        except InvalidModelError:
            return index.name
        return next((name for name in sorted(set(shards)) if not (folder / name).is_file()), None)
    return None if any(folder.glob("*.safetensors")) else "model.safetensors"
