"""Installing an engine: once, whole or not at all, and in words when it cannot be."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engines.build_steps import BuildSteps
from benchmarks.engines.install import Recipe, engines_dir, install, main, recipes
from benchmarks.errors import InstallFailed

VARIABLE = "SPLITSERVE_TOY_ENGINE"
Said = list[str]


class Toy:
    """An engine whose build writes its program, and counts how often."""

    def __init__(self, script: str = "") -> None:
        self.builds = 0
        self.script = script
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.may_end.set()

    def build(self, folder: Path, final: Path, steps: BuildSteps) -> None:
        self.builds += 1
        self.began.set()
        assert self.may_end.wait(30)
        program = folder / "bin" / "toy"
        program.parent.mkdir()
        program.write_text(f"for {final}\n", encoding="utf-8")
        if self.script:
            steps.run("running a script", [sys.executable, "-c", self.script])

    @property
    def recipe(self) -> Recipe:
        return Recipe("toy", "toy-1", "bin/toy", VARIABLE, {"version": "1"}, self.build)


@pytest.fixture(autouse=True)
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VARIABLE, "SPLITSERVE_ENGINES_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def put(toy: Toy, root: Path, said: Said | None = None) -> Path:
    return install(toy.recipe, root, (Said() if said is None else said).append)


def test_an_engine_is_built_once(tmp_path: Path) -> None:
    toy, said = Toy(), Said()
    program = put(toy, tmp_path / "engines", said)
    assert program == tmp_path / "engines" / "toy-1" / "bin" / "toy"
    assert program.read_text(encoding="utf-8") == f"for {program.parent.parent}\n"
    assert put(toy, tmp_path / "engines", said) == program
    assert toy.builds == 1
    assert said == [
        f"installed in {program.parent.parent}",
        f"{program.parent.parent} is there already",
    ]


def test_another_recipe_is_another_build(tmp_path: Path) -> None:
    toy = Toy()
    put(toy, tmp_path)
    (tmp_path / "toy-1" / "bin" / "old").touch()
    install(replace(toy.recipe, made_of={"version": "2"}), tmp_path, Said().append)
    assert toy.builds == 2
    assert not (tmp_path / "toy-1" / "bin" / "old").exists()


def test_a_failed_build_leaves_what_was_there(tmp_path: Path) -> None:
    toy = Toy()
    program = put(toy, tmp_path)
    broken = Toy("print('error: it is broken'); raise SystemExit(3)")
    with pytest.raises(InstallFailed) as raised:
        install(replace(broken.recipe, made_of={"version": "2"}), tmp_path, Said().append)
    log = tmp_path / "toy-1.log"
    assert str(raised.value) == (
        "toy: running a script ended with status 3: error: it is broken; its output is in "
        + str(log)
    )
    assert "error: it is broken\n" in log.read_text(encoding="utf-8")
    assert program.is_file()


def test_a_first_build_that_fails_leaves_no_engine(tmp_path: Path) -> None:
    with pytest.raises(InstallFailed):
        put(Toy("raise SystemExit(1)"), tmp_path)
    assert not (tmp_path / "toy-1").exists()
    assert put(Toy(), tmp_path).is_file()


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".toy-1.building" / "bin"
    leftover.mkdir(parents=True)
    assert put(Toy(), tmp_path).is_file()
    assert not leftover.exists()


def test_a_second_run_waits_for_the_first(tmp_path: Path) -> None:
    toy = Toy()
    toy.may_end.clear()
    waits = threading.Event()
    found: list[Path] = []

    def told(text: str) -> None:
        if "waiting" in text:
            waits.set()

    def run(say: Callable[[str], None]) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.append(install(toy.recipe, tmp_path, say)))
        thread.start()
        return thread

    first = run(Said().append)
    assert toy.began.wait(30)
    second = run(told)
    assert waits.wait(30)
    toy.may_end.set()
    for thread in (first, second):
        thread.join(30)
    assert found == [tmp_path / "toy-1" / "bin" / "toy"] * 2
    assert toy.builds == 1


def test_an_engine_named_in_the_environment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, own = Toy(), tmp_path / "own"
    monkeypatch.setenv(VARIABLE, str(own))
    with pytest.raises(InstallFailed, match=f"{VARIABLE} names .*own, which is no file"):
        put(toy, tmp_path)
    own.touch()
    assert put(toy, tmp_path) == own
    assert toy.builds == 0


def test_a_package_that_no_index_has_is_named_with_the_mend(tmp_path: Path) -> None:
    pip = (
        "print('ERROR: No matching distribution found for torch==2.13.0+cpu'); raise SystemExit(1)"
    )
    with pytest.raises(InstallFailed) as raised:
        put(Toy(pip), tmp_path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("toy: running a script: no package index of this pip has ")
    assert "torch==2.13.0+cpu" in str(raised.value)
    assert "PIP_EXTRA_INDEX_URL" in str(raised.value)


def test_a_program_that_is_missing_is_one_line(tmp_path: Path) -> None:
    with BuildSteps("toy", tmp_path / "log", Said().append) as steps:
        with pytest.raises(InstallFailed, match=r"toy: trying: .*no-such-program.*; install that"):
            steps.run("trying", [tmp_path / "no-such-program"])


def test_where_engines_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert engines_dir() == tmp_path / ".cache" / "splitserve" / "engines"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert engines_dir() == tmp_path / "x" / "splitserve" / "engines"
    monkeypatch.setenv("SPLITSERVE_ENGINES_DIR", str(tmp_path / "e"))
    assert engines_dir() == tmp_path / "e"


def test_the_command_prints_what_the_shell_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPLITSERVE_ENGINES_DIR", str(tmp_path))
    program = tmp_path / "program"
    program.touch()
    variables = {recipe.variable for recipe in recipes("torch").values()}
    assert variables == {"SPLITSERVE_VLLM_PYTHON", "SPLITSERVE_LLAMA_SERVER"}
    for variable in variables:
        monkeypatch.setenv(variable, str(program))
    assert main([]) == 0
    printed = capsys.readouterr()
    assert set(printed.out.splitlines()) == {f"{variable}={program}" for variable in variables}
    program.unlink()
    assert main(["llama-cpp"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: llama-cpp: SPLITSERVE_LLAMA_SERVER names ")


def test_an_unknown_engine_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["sglang"])
    assert raised.value.code == 2
    assert "sglang is no engine to install; choose of vllm, llama-cpp" in capsys.readouterr().err
