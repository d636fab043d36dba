"""Installs the real engines that tests and comparisons run against, once for a machine.

    python -m benchmarks.engines.install [vllm] [llama-cpp] [--torch "torch==2.13.0"]

Each goes into a folder of its own under `engines_dir()` and is used from there until its recipe
changes. An engine named in the environment already (SPLITSERVE_VLLM_PYTHON,
SPLITSERVE_LLAMA_SERVER) is left as it is. Standard output gets one line NAME=PATH for each, ready
for `export`; what is being done goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from benchmarks.engines import llama_cpp_recipe, vllm_recipe
from benchmarks.engines.build_steps import BuildSteps
from benchmarks.errors import InstallFailed

STAMP = "installed.json"


def engines_dir() -> Path:
    """`$SPLITSERVE_ENGINES_DIR`, else `splitserve/engines` in the user's cache folder."""
    configured = os.environ.get("SPLITSERVE_ENGINES_DIR")
    if configured:
        return Path(configured).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "splitserve" / "engines"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one engine gets onto this machine.

    `build(folder, final, steps)` makes it in `folder`, which becomes `final` when it is complete.
    `made_of` is what the result depends on: another value means another build. `program` is what
    is started, within the folder; `variable` names it in the environment.
    """

    name: str
    folder: str
    program: str
    variable: str
    made_of: Mapping[str, str]
    build: Callable[[Path, Path, BuildSteps], None]


def recipes(torch: str) -> dict[str, Recipe]:
    """The engines by name. `torch` is what pip installs as torch, options included."""
    vllm = Recipe(
        "vllm",
        f"vllm-{vllm_recipe.VERSION}",
        "bin/python",
        "SPLITSERVE_VLLM_PYTHON",
        vllm_recipe.made_of(),
        lambda folder, final, steps: vllm_recipe.build(folder, final, steps, torch),
    )
    llama_cpp = Recipe(
        "llama-cpp",
        f"llama-cpp-{llama_cpp_recipe.VERSION}",
        llama_cpp_recipe.PROGRAM,
        "SPLITSERVE_LLAMA_SERVER",
        llama_cpp_recipe.made_of(),
        llama_cpp_recipe.build,
    )
    return {recipe.name: recipe for recipe in (vllm, llama_cpp)}


def install(recipe: Recipe, root: Path, say: Callable[[str], None]) -> Path:
    """Return the engine's program, after building it where that is needed. Raises InstallFailed."""
    named = os.environ.get(recipe.variable)
    if named:
        if not Path(named).is_file():
            raise InstallFailed(
                f"{recipe.name}: {recipe.variable} names {named}, which is no file; "
                "name the program there, or unset it to have the engine installed"
            )
        say(f"{named} is used, as {recipe.variable} says")
        return Path(named)
    root.mkdir(parents=True, exist_ok=True)
    final = root / recipe.folder
    lock = FileLock(root / f".{recipe.folder}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say("another run installs it; waiting for that one")
        lock.acquire()
    try:
        if _is_current(final, recipe):
            say(f"{final} is there already")
        else:
            _build(recipe, final, say)
    finally:
        lock.release()
    return final / recipe.program


def _is_current(final: Path, recipe: Recipe) -> bool:
    try:
        stamp = json.loads((final / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stamp == dict(recipe.made_of) and (final / recipe.program).exists()


def _build(recipe: Recipe, final: Path, say: Callable[[str], None]) -> None:
    """Build beside the final folder, so that this one is never there in half."""
    building = final.with_name(f".{final.name}.building")
    old = final.with_name(f".{final.name}.old")
    for leftover in (building, old):  # of a run that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    building.mkdir()
    with BuildSteps(recipe.name, final.with_name(f"{final.name}.log"), say) as steps:
        recipe.build(building, final, steps)
    stamp = json.dumps(dict(recipe.made_of), indent=1)
    (building / STAMP).write_text(stamp + "\n", encoding="utf-8")
    if final.exists():
        final.rename(old)
    building.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    say(f"installed in {final}")


def install_all(wanted: Sequence[Recipe], root: Path) -> list[str]:
    """Install side by side: one mostly downloads, the other compiles. Returns what went wrong.

    Prints NAME=PATH for each that is there.
    """
    turn = threading.Lock()

    def one(recipe: Recipe) -> str | None:
        def say(text: str) -> None:
            with turn:
                print(f"{recipe.name}: {text}", file=sys.stderr, flush=True)

        try:
            program = install(recipe, root, say)
        except InstallFailed as error:
            return str(error)
        except OSError as error:
            return f"{recipe.name}: {error}; see that {root} can be written and has 8 GB free"
        with turn:
            print(f"{recipe.variable}={program}", flush=True)
        return None

    with ThreadPoolExecutor(max_workers=len(wanted)) as pool:
        return [error for error in pool.map(one, wanted) if error is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.install",
        description="Install real engines to test against, once for this machine.",
    )
    names = ", ".join(recipes(""))
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help=f"of {names}; default all")
    parser.add_argument(
        "--torch", default="torch==2.13.0", help="what pip installs as torch, with its options"
    )
    arguments = parser.parse_args(argv)
    known = recipes(arguments.torch)
    unknown = [name for name in arguments.engines if name not in known]
    if unknown:
        parser.error(f"{unknown[0]} is no engine to install; choose of {names}")
    errors = install_all([known[name] for name in arguments.engines or known], engines_dir())
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
