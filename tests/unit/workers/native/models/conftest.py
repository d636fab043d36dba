"""Tiny models that transformers makes, and the real ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.native.model_store import ModelFolder, ModelStore, resolve
from workers.native.model_store.errors import ModelNotFoundError
from workers.native.models.decoder import Decoder
from workers.native.models.dense_kv import DenseKv

LogitsOf = Callable[[Decoder, Tensor, int], Tensor]


@pytest.fixture(scope="session")
def logits_of() -> LogitsOf:
    """All logits of one sequence, computed in chunks of the given size."""

    def compute(decoder: Decoder, ids: Tensor, chunk_tokens: int) -> Tensor:
        kv = DenseKv(decoder.config, len(ids), decoder.dtype)
        parts = []
        for start in range(0, len(ids), chunk_tokens):
            chunk = ids[start : start + chunk_tokens]
            positions = torch.arange(start, start + len(chunk))
            parts.append(decoder.forward(chunk, positions, kv, torch.arange(len(chunk))))
            kv.advance(len(chunk))
        return torch.cat(parts)

    return compute


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Any]:
    """The transformers model of a folder, float32, ready to call."""
    transformers = pytest.importorskip("transformers")

    def load(folder: Path) -> Any:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.eval()

    return load


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], ModelFolder]:
    """A model by short name; its weights come from a package where no hub answers."""

    def find(name: str) -> ModelFolder:
        try:
            return resolve(name)
        except ModelNotFoundError as error:
            pytest.skip(f"no source for real weights: {error}")

    return find


@pytest.fixture(scope="session")
def real_gguf(real_model: Callable[[str], ModelFolder]) -> Callable[[str], Path]:
    """The GGUF file that a real model was converted from."""

    def find(name: str) -> Path:
        real_model(name)
        path = ModelStore().gguf(name)
        if path is None:
            pytest.skip(f"{name} came from the hub: there is no GGUF file to compare with")
        return path

    return find


@pytest.fixture
def save_config() -> Callable[[Path, dict[str, Any]], None]:
    """Change entries of a folder's config.json."""

    def change(folder: Path, entries: dict[str, Any]) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change
