"""What `splitserve probe` shows and writes, of a fleet that is given."""

import io
import json
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from router.backends.base import WorkerOptions
from router.backends.speed_probe import Speeds
from router.cli.errors import CommandFailed, WrongUsage
from router.cli.probe import worker_specs
from router.cli.probe_file import write_configuration
from router.cli.probe_tables import document, print_fleet
from router.errors import ProbeFailed, SettingsError
from router.fleet_probe import Address, Found
from router.origin import parse_origin
from router.sections import WorkerSpec
from router.settings import build, load
from splitserve.messages import Role, WorkerSnapshot

GOLDEN = """\
worker         engine       models              context  hand-off   prefill tok/s  decode tok/s  \
round trip ms  suggested role
gpu-1          vllm 0.32.0  m                      2048  nixl-pull           9000           100  \
          0.5  prefill
10.0.0.6:8000  vllm 0.32.0  m                      2048  nixl-pull            450          50.0  \
          1.2  decode
[::1]:11434    ollama 0.9   a, b, c and 2 more        -  no                     -             -  \
         12.0  aggregated

gpu-1: max_running 256 is assumed
[::1]:11434: no hand-off: ollama has no way to move KV
[::1]:11434: speed not measured: it has 5 models; choose one with model=NAME

Pairs
prefill        decode         can hand off
gpu-1          10.0.0.6:8000  yes
gpu-1          [::1]:11434    [::1]:11434 (ollama) has no way to move KV
10.0.0.6:8000  gpu-1          yes
10.0.0.6:8000  [::1]:11434    [::1]:11434 (ollama) has no way to move KV
[::1]:11434    gpu-1          [::1]:11434 (ollama) has no way to move KV
[::1]:11434    10.0.0.6:8000  [::1]:11434 (ollama) has no way to move KV
"""


def found(
    url: str,
    engine: str = "vllm",
    *,
    name: str = "",
    models: tuple[str, ...] = ("m",),
    version: str = "0.32.0",
    connector: str = "",
    speeds: tuple[float, float] | None = None,
    round_trip_s: float = 0.0005,
    context: int = 0,
    notes: tuple[str, ...] = (),
    why_no_speeds: str = "",
    why_no_handoff: str = "",
) -> Found:
    origin = parse_origin(url)
    name = name or origin.url.removeprefix("http://")
    prefill_tok_s, decode_tok_s = speeds or (0.0, 0.0)
    snapshot = WorkerSnapshot(
        worker_id=name,
        role=Role.AUTO,
        engine=engine,
        models=models,
        connector=connector,
        pairing_key="model=m" if connector else "",
        max_context_tokens=context,
        prefill_tok_s=prefill_tok_s,
        decode_tok_s=decode_tok_s,
        notes=(f"version {version}", *notes),
    )
    measured = Speeds(prefill_tok_s, decode_tok_s, 0.004) if speeds else None
    address = Address(name, origin, WorkerOptions())
    return Found(address, snapshot, version, round_trip_s, measured, why_no_speeds, why_no_handoff)


@pytest.fixture
def fleet() -> list[Found]:
    return [
        found(
            "http://10.0.0.5:8000",
            name="gpu-1",
            connector="nixl-pull",
            speeds=(9000, 100.2),
            context=2048,
            notes=("max_running 256 is assumed",),
        ),
        found(
            "10.0.0.6:8000",
            connector="nixl-pull",
            speeds=(450, 50),
            context=2048,
            round_trip_s=0.0012,
        ),
        found(
            "[::1]:11434",
            "ollama",
            version="0.9",
            models=tuple("abcde"),
            round_trip_s=0.012,
            why_no_speeds="it has 5 models; choose one with model=NAME",
            why_no_handoff="ollama has no way to move KV",
        ),
    ]


@pytest.fixture
def specs() -> tuple[WorkerSpec, ...]:
    return worker_specs(
        [
            "http://10.0.0.5:8000/v1,name=gpu-1,kv=nixl-pull",
            "10.0.0.6:8000,kv=nixl-pull,kv.lease_s=20",
            "[::1]:11434",
        ],
        None,
    )


def drawn(fleet: list[Found]) -> str:
    console = Console(file=io.StringIO(), width=1000)
    print_fleet(console, fleet)
    assert isinstance(console.file, io.StringIO)
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_the_table_is_this_one(fleet: list[Found]) -> None:
    assert drawn(fleet) == GOLDEN


def test_one_worker_has_no_pairs(fleet: list[Found]) -> None:
    assert "Pairs" not in drawn(fleet[:1])


def test_why_there_is_no_hand_off_is_told_once() -> None:
    why = "no courier is configured for it; write its address"
    text = drawn([found("a:1", "llama.cpp", why_no_handoff=why, notes=(why, "its cache is small"))])
    assert text.count("no courier") == 1
    assert f"a:1: no hand-off: {why}\n" in text
    assert "a:1: its cache is small\n" in text
    assert "no hand-off:" not in drawn([found("a:1", "llama.cpp", connector="c")])


def test_the_document_is_plain_json(fleet: list[Found]) -> None:
    failed = [ProbeFailed("http://b:1", "cannot connect (refused)", "start it")]
    shown = json.loads(json.dumps(document(fleet, failed, Path("s.yaml"))))
    assert set(shown) == {"workers", "pairs", "failed", "written"}
    first, _, ollama = shown["workers"]
    assert first["name"] == "gpu-1"
    assert first["url"] == "http://10.0.0.5:8000"
    assert (first["engine"], first["version"], first["models"]) == ("vllm", "0.32.0", ["m"])
    assert (first["prefill_tok_s"], first["decode_tok_s"]) == (9000, 100.2)
    assert (first["round_trip_ms"], first["fixed_ms"]) == (0.5, 4.0)
    assert (first["connector"], first["why_no_handoff"], first["role"]) == (
        "nixl-pull", None, "prefill",
    )  # fmt: skip
    assert ollama["prefill_tok_s"] is None
    assert ollama["context_tokens"] is None
    assert ollama["why_no_handoff"] == "ollama has no way to move KV"
    assert shown["pairs"][0] == {
        "prefill": "gpu-1", "decode": "10.0.0.6:8000", "can_hand_off": True, "why_not": None,
    }  # fmt: skip
    assert not shown["pairs"][1]["can_hand_off"]
    assert shown["failed"] == [
        {"url": "http://b:1", "error": "http://b:1: cannot connect (refused); start it"}
    ]
    assert shown["written"] == "s.yaml"


def test_what_is_written_is_a_configuration(
    fleet: list[Found], specs: tuple[WorkerSpec, ...], tmp_path: Path
) -> None:
    path = tmp_path / "splitserve.yaml"
    write_configuration(path, specs, fleet)
    assert path.read_text() == (
        "# Written by splitserve probe: roles and the figures at the end of lines are what it "
        "found.\n"
        "# Serve it with: splitserve route -c splitserve.yaml\n"
        "listen: 127.0.0.1:8000\n"
        "models:\n"
        "  m:\n"
        "    workers:\n"
        "      - {url: 'http://10.0.0.5:8000', name: gpu-1, kv: {connector: nixl-pull}, "
        "role: prefill}  # vllm 0.32.0, prefill 9000 tok/s, decode 100 tok/s\n"
        "      - {url: 'http://10.0.0.6:8000', kv: {connector: nixl-pull, lease_s: 20.0}, "
        "role: decode}  # vllm 0.32.0, prefill 450 tok/s, decode 50 tok/s\n"
        "workers:\n"
        "  - {url: 'http://[::1]:11434', role: aggregated}  # ollama 0.9\n"
    )
    settings = load(path)
    assert [spec.role for spec in settings.worker_specs] == ["prefill", "decode", "aggregated"]
    assert settings.worker_specs[1].kv == specs[1].kv
    assert [p.name for p in tmp_path.iterdir()] == ["splitserve.yaml"]


@pytest.mark.parametrize("model", ["yes", "a: b", "x # y", "org/name", "7", "é'\""])
def test_any_model_name_reads_back(model: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    write_configuration(path, worker_specs(["a:1"], None), [found("a:1", models=(model,))])
    assert list(load(path).models) == [model]


def test_every_key_of_an_entry_reads_back(tmp_path: Path) -> None:
    argument = (
        "a:1,kv=nixl-push,kv.engine_id=e,kv.side_channel=[::1]:5600,kv_events=h:5557,"
        "model=m,engine_model=M,engine=vllm,courier=http://c:2,courier_key_env=K"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("K", "k")
        specs = worker_specs([argument], "K")
    path = tmp_path / "c.yaml"
    write_configuration(path, specs, [found("a:1")])
    (read,) = load(path).worker_specs
    assert read == specs[0].model_copy(update={"role": Role.AGGREGATED})
    assert yaml.safe_load(path.read_text())["models"]["m"]["workers"][0]["key_env"] == "K"


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"none/c.yaml cannot be written \(No such file"):
        write_configuration(
            tmp_path / "none" / "c.yaml", worker_specs(["a:1"], None), [found("a:1")]
        )


@pytest.mark.parametrize(
    "argument,said",
    [
        ("ftp://a", "ftp://a: url: scheme 'ftp' is not http or https; write"),
        ("a:1,courier", "'courier' is no key=value; write it like http://mac.local"),
        ("a:1,courier=", "'courier=' is no key=value"),
        ("a:1,corier=b:2", "corier: unknown key; did you mean 'courier'?"),
        ("a:1,kv=nixl", "kv.connector: 'nixl' does not fit; write one of nixl-pull"),
        ("a:1,kv=example", "example needs folder"),
        ("a:1,kv=nixl-pull,kv.lease_s=x", "kv.lease_s: 'x' does not fit; write seconds"),
        ("a:1,start=x", "either url or start"),
    ],
)
def test_wrong_arguments_are_one_line(argument: str, said: str) -> None:
    with pytest.raises(WrongUsage) as caught:
        worker_specs(["b:1", argument], None)
    assert str(caught.value).startswith(argument)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_must_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(SettingsError, match="environment variable NO_SUCH_KEY is not set"):
        worker_specs(["a:1"], "NO_SUCH_KEY")


def test_an_address_given_twice_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"http://a:1 \(None\) is there twice"):
        worker_specs(["a:1", "http://a:1/"], None)


def test_ports_of_a_worker_survive_a_dump() -> None:
    entry = {"url": "a:1", "kv_events": "h:5557"}
    settings = build({"workers": [entry]})
    assert build(settings.model_dump(exclude_none=True)) == settings
