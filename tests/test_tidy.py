"""The house rules as a test.

A rule is a function from a source file to the lines that break it. Each rule also gets a snippet
that breaks it and one that does not, so that a rule which finds nothing is known to be able to.
"""

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("splitserve", "router", "workers", "benchmarks")

MAX_FILE_LINES = 400
MEDIAN_FILE_LINES = 150
MAX_FUNCTION_LINES = 70
USUAL_FUNCTION_LINES = 35
USUAL_SHARE = 0.9


@dataclass(frozen=True)
class Source:
    """A file of the repository: its path from the root and its text."""

    path: PurePosixPath
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def package(self) -> str:
        return self.path.parts[0]


Rule = Callable[[Source], Iterator[str]]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: Source) -> list[FunctionNode]:
    return [n for n in source.nodes if isinstance(n, FunctionNode)]


def function_lines(node: FunctionNode) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def words(expression: ast.expr | None) -> set[str]:
    """The names in an annotation, a decorator or a call, however it is written."""
    if expression is None:
        return set()
    return set(re.findall(r"\w+", ast.unparse(expression)))


# --- rules on any Python file ---------------------------------------------------------------------


def file_too_long(source: Source) -> Iterator[str]:
    if len(source.lines) > MAX_FILE_LINES:
        yield f"{len(source.lines)} lines, limit {MAX_FILE_LINES}"


def function_too_long(source: Source) -> Iterator[str]:
    for node in functions(source):
        if (lines := function_lines(node)) > MAX_FUNCTION_LINES:
            yield f"{node.lineno}: {node.name} has {lines} lines, limit {MAX_FUNCTION_LINES}"


VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def vague_file_name(source: Source) -> Iterator[str]:
    for part in (*source.path.parts[:-1], source.path.stem):
        if found := VAGUE & set(part.lower().split("_")):
            yield f"'{found.pop()}' in a file name says nothing; name the noun it holds"


def decorated_class_name(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and re.search(
            r"^_?Base[A-Z]|^_?I[A-Z][a-z]|Impl$", node.name
        ):
            yield f"{node.lineno}: class {node.name}: no Base, I or Impl in names"


def global_statement(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"


def swallowed_exception(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is not None and not words(node.type) & {"Exception", "BaseException"}:
            continue
        raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
        near = " ".join(source.lines[max(node.lineno - 2, 0) : node.lineno + 1])
        if not raises and "task boundary" not in near:
            yield (
                f"{node.lineno}: catches everything and does not raise; name the exception, or say "
                "'task boundary' and why in a comment"
            )


# --- rules on the packages ------------------------------------------------------------------------

CONTAINERS = {"dict", "list", "set", "defaultdict", "deque", "Counter", "OrderedDict"}


def module_state(source: Source) -> Iterator[str]:
    """A mutable container at module level that is empty, or not named as a constant."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            target, value = node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            target, value = node.target.id, node.value
        else:
            continue
        empty = ast.unparse(value) in {"{}", "[]"}
        if isinstance(value, ast.Call) and words(value.func) & CONTAINERS:
            empty = not value.args or bool(words(value.func) & {"defaultdict", "deque"})
        elif not isinstance(value, ast.Dict | ast.List | ast.Set):
            continue
        constant = target.lstrip("_").isupper() or target.startswith("__")
        if empty or not constant:
            yield f"{node.lineno}: {target} is module state; give it to a constructor"


def cached_singleton(source: Source) -> Iterator[str]:
    for node in functions(source):
        cached = any(words(d) & {"cache", "lru_cache"} for d in node.decorator_list)
        if cached and not node.args.args and not node.args.kwonlyargs:
            yield f"{node.lineno}: {node.name} is a singleton; build it in the composition root"


def foreign_import_in_core(source: Source) -> Iterator[str]:
    if source.package != "splitserve":
        return
    for node in source.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        for name in names:
            if name.split(".")[0] not in {*sys.stdlib_module_names, "splitserve"}:
                yield f"{getattr(node, 'lineno', 0)}: the core imports {name}; stdlib only"


def unseeded_random_in_core(source: Source) -> Iterator[str]:
    if source.package != "splitserve":
        return
    for node in source.nodes:
        names: set[str] = set()
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random":
            names = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "random":
            names = {alias.name for alias in node.names}
        for name in sorted(names - {"Random"}):
            yield f"{getattr(node, 'lineno', 0)}: random.{name}; take a seeded random.Random"


TIME_UNITS = {"s", "ms", "us", "ns"}
SIZE_UNITS = {"tokens", "blocks", "bytes", "kb", "mb", "gb", "pages", "requests", "items"}
QUANTITIES = {
    **dict.fromkeys(
        ("timeout", "delay", "duration", "latency", "deadline", "interval"), TIME_UNITS
    ),
    **dict.fromkeys(("size", "bytes"), SIZE_UNITS),
}
# Dimensions every model's config.json calls by these names; counted in elements, not in a unit.
DIMENSIONS = {"vocab_size", "hidden_size", "intermediate_size", "batch_size", "world_size"}


def lacks_unit(name: str, annotation: ast.expr | None) -> bool:
    types = words(annotation)
    if not types & {"int", "float"} or not types <= {"int", "float", "None", "Optional", "Final"}:
        return False
    parts = name.lower().split("_")
    units = [QUANTITIES[part] for part in parts if part in QUANTITIES]
    if not units or name in DIMENSIONS or {"per", "count", "ratio", "share"} & set(parts):
        return False
    return not any(parts[-1] in allowed for allowed in units) and parts[-2:] != ["bytes", "s"]


def public_dataclass_fields(node: ast.AST) -> list[ast.AnnAssign]:
    if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
        return []
    if not any("dataclass" in words(d) for d in node.decorator_list):
        return []
    return [item for item in node.body if isinstance(item, ast.AnnAssign)]


def missing_unit(source: Source) -> Iterator[str]:
    """Numeric fields of public dataclasses and numeric parameters of public functions."""
    for node in source.nodes:
        for field in public_dataclass_fields(node):
            if lacks_unit(ast.unparse(field.target), field.annotation):
                yield f"{field.lineno}: field {ast.unparse(field.target)} has no unit"
        if isinstance(node, FunctionNode) and not node.name.startswith("_"):
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                if lacks_unit(argument.arg, argument.annotation):
                    yield f"{argument.lineno}: {node.name}({argument.arg}) has no unit"


# --- rules on tests and on every text file --------------------------------------------------------


def sleeping_test(source: Source) -> Iterator[str]:
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name not in {"time.sleep", "asyncio.sleep", "anyio.sleep", "sleep"}:
            continue
        yields = name != "time.sleep" and len(node.args) == 1 and ast.unparse(node.args[0]) == "0"
        if not yields:
            yield f"{node.lineno}: {ast.unparse(node)}; wait on an event with a timeout instead"


# In pieces, so that this file does not break its own rule.
MACHINE_PATH = re.compile(r"(?<![\w.~-])/(?:" + "|".join(("work", "root", "home")) + r")/")
HOSTS = "pypi,org pythonhosted,org download.pytorch,org npmjs,org anaconda,org crates,io"
REGISTRY_HOST = re.compile("|".join(re.escape(host.replace(",", ".")) for host in HOSTS.split()))


def machine_or_registry(source: Source) -> Iterator[str]:
    for number, line in enumerate(source.lines, start=1):
        for pattern in (MACHINE_PATH, REGISTRY_HOST):
            if found := pattern.search(line):
                yield f"{number}: '{found.group()}' belongs to one machine or one registry"


PYTHON_RULES: tuple[Rule, ...] = (
    file_too_long,
    function_too_long,
    vague_file_name,
    decorated_class_name,
    global_statement,
    swallowed_exception,
)
PACKAGE_RULES: tuple[Rule, ...] = (
    module_state,
    cached_singleton,
    foreign_import_in_core,
    unseeded_random_in_core,
    missing_unit,
)


# --- the repository -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository() -> list[Source]:
    """Every text file that is tracked or would be: ignored files are nobody's business."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    sources = []
    for name in sorted({n for n in listed.split("\0") if n}):
        content = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b"\0"
        if b"\0" not in content:
            text = content.decode("utf-8", errors="replace")
            sources.append(Source(PurePosixPath(name), text))
    return sources


def python_files(sources: list[Source], *tops: str) -> list[Source]:
    return [s for s in sources if s.path.suffix == ".py" and (not tops or s.package in tops)]


def assert_kept(rule: Rule, sources: list[Source]) -> None:
    findings = [f"{s.path}:{finding}" for s in sources for finding in rule(s)]
    if findings:
        pytest.fail("\n".join(findings), pytrace=False)


@pytest.mark.parametrize("rule", PYTHON_RULES)
def test_python_files(rule: Rule, repository: list[Source]) -> None:
    assert_kept(rule, python_files(repository))


@pytest.mark.parametrize("rule", PACKAGE_RULES)
def test_packages(rule: Rule, repository: list[Source]) -> None:
    assert_kept(rule, python_files(repository, *PACKAGES))


def test_tests_do_not_sleep(repository: list[Source]) -> None:
    assert_kept(sleeping_test, python_files(repository, "tests"))


def test_no_machine_or_registry_is_named(repository: list[Source]) -> None:
    assert_kept(machine_or_registry, repository)


def test_usual_sizes(repository: list[Source]) -> None:
    sources = python_files(repository, *PACKAGES)
    file_lines = [len(s.lines) for s in sources if s.lines]
    assert statistics.median(file_lines) <= MEDIAN_FILE_LINES
    lengths = sorted(function_lines(f) for s in sources for f in functions(s))
    short = sum(lines < USUAL_FUNCTION_LINES for lines in lengths)
    assert short >= USUAL_SHARE * len(lengths), f"{short} of {len(lengths)} functions are short"


def test_layout(repository: list[Source]) -> None:
    paths = {str(s.path) for s in repository}
    assert "conftest.py" not in paths
    tests = python_files(repository, "tests")
    assert [str(s.path) for s in tests if s.path.name == "__init__.py"] == []
    names = [s.path.name for s in tests if s.path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names)), "two test files share a name"
    for package in PACKAGES:
        assert f"{package}/py.typed" in paths


# --- each rule can fail ---------------------------------------------------------------------------

BODY = "\n    x = 1"
TRY = "try:\n  f()\n"
FIELD = "@dataclass(frozen=True)\nclass A:\n  "
EXAMPLES: list[tuple[Rule, str, str]] = [
    (file_too_long, "\n" * 401, "\n" * 400),
    (function_too_long, "def f():" + BODY * 70, "def f():" + BODY * 69),
    (decorated_class_name, "class BaseEngine: ...", "class Baseline: ..."),
    (decorated_class_name, "class IEngine: ...", "class ITLStats: ..."),
    (decorated_class_name, "class EngineImpl: ...", "class Engine: ..."),
    (global_statement, "def f():\n  global x", "def f():\n  x = 1\n  del x"),
    (swallowed_exception, TRY + "except Exception:\n  pass", TRY + "except ValueError:\n  pass"),
    (
        swallowed_exception,
        TRY + "except:\n  pass",
        TRY + "except Exception as e:\n  raise A from e",
    ),
    (
        swallowed_exception,
        TRY + "except (OSError, BaseException):\n  pass",
        TRY + "except Exception:  # task boundary: becomes an Event\n  pass",
    ),
    (module_state, "PENDING: dict[str, int] = {}", "UNITS = {'s': 1}"),
    (module_state, "seen = set()", "__all__ = ['a']"),
    (module_state, "SEEN = defaultdict(list)", "SEEN = frozenset({1})"),
    (cached_singleton, "@cache\ndef f(): ...", "@cache\ndef f(n): ..."),
    (foreign_import_in_core, "import numpy.linalg", "import math"),
    (foreign_import_in_core, "from router import x", "from . import x"),
    (unseeded_random_in_core, "random.random()", "random.Random(7)"),
    (unseeded_random_in_core, "from random import gauss", "import random"),
    (missing_unit, FIELD + "timeout: float = 1", FIELD + "timeout_s: float = 1\n  size: Size"),
    (missing_unit, "def f(*, deadline: float | None): ...", "def f(deadline_s: int): ..."),
    (missing_unit, "def f(block_size: int): ...", "def f(vocab_size: int): ..."),
    (missing_unit, "def f(bytes_sent: int): ...", "def f(kv_bytes_per_token, r_bytes_s): ..."),
    (sleeping_test, "time.sleep(0)", "event.wait(1)"),
    (sleeping_test, "asyncio.sleep(0.1)", "asyncio.sleep(0)"),
    (machine_or_registry, "see /ro" + "ot/x", "see /v1/work/x and ~/x"),
    (machine_or_registry, "https://py" + "pi.org/simple", "on PyPI"),
]


def find(rule: Rule, text: str, path: str = "splitserve/a.py") -> list[str]:
    return list(rule(Source(PurePosixPath(path), text)))


@pytest.mark.parametrize("rule,bad,good", EXAMPLES)
def test_rule_can_fail(rule: Rule, bad: str, good: str) -> None:
    assert find(rule, bad)
    assert find(rule, good) == []


@pytest.mark.parametrize("path", ["router/utils.py", "router/kv_manager.py", "workers/common/x.py"])
def test_vague_names_are_found(path: str) -> None:
    assert find(vague_file_name, "", path)
    assert find(vague_file_name, "", "router/backends/base.py") == []


def test_core_rules_leave_the_edge_alone() -> None:
    assert find(foreign_import_in_core, "import aiohttp", "router/a.py") == []
    assert find(unseeded_random_in_core, "random.random()", "workers/a.py") == []


def test_every_rule_has_an_example() -> None:
    shown = {example[0] for example in EXAMPLES} | {vague_file_name}
    assert shown == {*PYTHON_RULES, *PACKAGE_RULES, sleeping_test, machine_or_registry}
