"""A hash of a model's weights and rules: two workers may share KV only when theirs are equal."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from workers.native.model_store.progress import LogReporter, Reporter
from workers.native.models.errors import InvalidModelError
from workers.native.models.hf_config import read_json, read_model_config

_CACHE_FILE = "splitserve-hash.json"
_CHUNK_BYTES = 1 << 22
_DIGEST_BYTES = 20


def model_hash(folder: Path, reporter: Reporter | None = None) -> str:
    """40 hexadecimal digits: BLAKE2b over all safetensors bytes and the parsed configuration.

    Kept in a small JSON file in the folder with the files' sizes and modification times, so that
    it is computed once; a folder that cannot be written is hashed each time.
    Raises InvalidModelError and UnsupportedModelError as `read_model_config` does.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidModelError(f"{folder} holds no *.safetensors weights; pull the model again")
    rules = json.dumps(asdict(read_model_config(folder)), sort_keys=True)
    stamp = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    cache = folder / _CACHE_FILE
    known = _read_cache(cache)
    if known.get("stamp") == stamp and known.get("rules") == rules:
        return str(known["hash"])
    digest = _digest(files, rules, reporter or LogReporter())
    try:
        cache.write_text(json.dumps({"hash": digest, "stamp": stamp, "rules": rules}) + "\n")
    except OSError:
        (reporter or LogReporter()).say(f"{folder} is read-only: its hash is computed each time")
    return digest


def _read_cache(path: Path) -> dict[str, object]:
    try:
        return read_json(path)
    except InvalidModelError:
        return {}


def _digest(files: list[Path], rules: str, reporter: Reporter) -> str:
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    total = sum(file.stat().st_size for file in files)
    done = 0
    with reporter.bar("hashing weights") as advance:
        for file in files:
            with file.open("rb") as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    state.update(chunk)
                    done += len(chunk)
                    advance(done, total)
    state.update(rules.encode())
    return state.hexdigest()
