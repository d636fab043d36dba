"""The model hash: what changes it, and that it is computed once."""

import json
import shutil
from pathlib import Path

import pytest

from workers.native.model_store.model_hash import model_hash
from workers.native.models.errors import InvalidModelError
from workers.native.testing.tiny_model import write_tiny_folder


def test_equal_weights_have_equal_hashes(tmp_path: Path) -> None:
    first, second = write_tiny_folder(tmp_path / "a"), write_tiny_folder(tmp_path / "b")
    other = write_tiny_folder(tmp_path / "c", seed=1)
    assert model_hash(first) == model_hash(second)
    assert model_hash(first) != model_hash(other)
    assert len(model_hash(first)) == 40


def test_the_rules_count_their_spelling_does_not(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "a")
    before = model_hash(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_theta": config.pop("rope_theta"), "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps({"rope_parameters": rope} | config))
    assert model_hash(folder) == before
    rope["rope_theta"] = 5000.0
    (folder / "config.json").write_text(json.dumps({"rope_parameters": rope} | config))
    assert model_hash(folder) != before


def test_computed_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "a")
    before = model_hash(folder)
    cache = folder / "splitserve-hash.json"
    known = json.loads(cache.read_text())
    cache.write_text(json.dumps(known | {"hash": "from the file"}))
    assert model_hash(folder) == "from the file"
    other = write_tiny_folder(tmp_path / "b", seed=1)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    assert model_hash(folder) == model_hash(other) != before
    cache.write_text("not json")
    assert model_hash(folder) == model_hash(other)


def test_nothing_to_hash(tmp_path: Path) -> None:
    with pytest.raises(InvalidModelError, match=r"no .*safetensors"):
        model_hash(tmp_path)
