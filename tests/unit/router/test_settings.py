"""Reading a good configuration."""

from pathlib import Path

import pytest
import yaml

from router.errors import SettingsError
from router.settings import Listen, RouterSettings, build, dump, load
from splitserve.messages import Role, Slo

FULL = """
listen: "[::1]:8100"
models:
  llama-3.1-8b:
    workers:
      - {url: http://10.0.0.5:8000/v1/, role: prefill, name: gpu-1}
      - {url: http://mac.local:8080, role: decode, courier: http://mac.local:8090}
      - {url: old-box, role: aggregated}
      - {start: "vllm serve M --port {port}", role: auto}
workers:
  - {url: http://10.0.0.9:8000}
classes:
  interactive: {ttft_ms: 1000, tpot_ms: 50}
  agent: {deadline_ms: 5000}
  batch: {deadline_s: 86400}
  whenever: {}
default_class: agent
policy: least-work
tenants:
  - {name: alice, key_env: ALICE_KEY, weight: 2, tokens_per_minute: 100000}
admin: {key_env: SPLITSERVE_ADMIN_KEY}
limits: {queue: 10, first_byte_s: 2.5}
event_log: events.jsonl
report_interval_s: 0.5
"""


@pytest.fixture
def full(tmp_path: Path) -> RouterSettings:
    path = tmp_path / "splitserve.yaml"
    path.write_text(FULL)
    return load(path)


def test_every_key_is_read(full: RouterSettings) -> None:
    assert (full.listen.host, full.listen.port) == ("::1", 8100)
    assert full.default_class == "agent"
    assert full.tenants[0].weight == 2
    assert full.admin is not None
    assert full.admin.key_env == "SPLITSERVE_ADMIN_KEY"
    assert (full.limits.queue, full.limits.first_byte_s) == (10, 2.5)
    assert full.event_log == Path("events.jsonl")
    assert full.report_interval_s == 0.5


def test_workers_are_told_with_their_model(full: RouterSettings) -> None:
    specs = full.worker_specs
    assert [spec.model for spec in specs] == ["llama-3.1-8b"] * 4 + [None]
    roles = ["prefill", "decode", "aggregated", "auto", "auto"]
    assert [spec.role for spec in specs] == [Role(name) for name in roles]
    assert specs[0].name == "gpu-1"
    assert [spec.url for spec in specs] == [
        "http://10.0.0.5:8000",
        "http://mac.local:8080",
        "http://old-box:80",
        None,
        "http://10.0.0.9:8000",
    ]


def test_targets_are_seconds(full: RouterSettings) -> None:
    assert full.classes["interactive"].slo == Slo(ttft_s=1.0, tpot_s=0.05)
    assert full.classes["agent"].slo == Slo(deadline_s=5.0)
    assert full.classes["batch"].slo == Slo(deadline_s=86400.0)
    assert full.classes["whenever"].slo == Slo()


def test_effective_configuration_reads_back_equal(full: RouterSettings, tmp_path: Path) -> None:
    path = tmp_path / "effective.yaml"
    path.write_text(dump(full))
    assert load(path) == full
    assert yaml.safe_load(dump(full))["listen"] == "[::1]:8100"


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing yet\n")
    assert load(path) == build({}) == RouterSettings()
    assert str(load(path).listen) == "127.0.0.1:8000"
    assert sorted(load(path).classes) == ["agent", "batch", "interactive"]


@pytest.mark.parametrize(
    "written,host,port",
    [
        ("0.0.0.0:80", "0.0.0.0", 80),
        ("localhost:0", "localhost", 0),
        ("[::]:8000", "::", 8000),
        (8080, "127.0.0.1", 8080),
    ],
)
def test_listen_forms(written: str | int, host: str, port: int) -> None:
    listen = build({"listen": written}).listen
    assert (listen.host, listen.port) == (host, port)


@pytest.mark.parametrize(
    "host,url",
    [
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("10.0.0.1", "http://10.0.0.1:80"),
    ],
)
def test_listen_url_can_be_reached(host: str, url: str) -> None:
    assert Listen(host=host, port=80).url == url


def test_settings_are_frozen(full: RouterSettings) -> None:
    with pytest.raises(ValueError, match="frozen"):
        full.policy = "slack"


def test_keys_must_be_in_the_environment(full: RouterSettings) -> None:
    both = {"ALICE_KEY": "a", "SPLITSERVE_ADMIN_KEY": "b"}
    full.require_keys(both)
    for name, place in (("ALICE_KEY", "tenants[0]"), ("SPLITSERVE_ADMIN_KEY", "admin")):
        with pytest.raises(SettingsError) as caught:
            full.require_keys({**both, name: ""})
        assert str(caught.value).startswith(f"{place}.key_env: environment variable {name}")
        assert "export" in str(caught.value)
