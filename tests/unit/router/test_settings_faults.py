"""Every refused configuration is one line: place, cause, mend."""

from pathlib import Path

import pytest

from router.errors import SettingsError
from router.settings import build, load

WORKER = "url: 'http://x'"


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


@pytest.mark.parametrize(
    "text,place,near",
    [
        ("listn: 127.0.0.1:8000", ":1: listn", "listen"),
        ("\n\npolcy: x", ":3: polcy", "policy"),
        ("models:\n  m:\n    worker: []", ":3: models.m.worker", "workers"),
        (
            f"models:\n  m:\n    workers:\n      - {WORKER}\n        rol: decode",
            ":5: models.m.workers[0].rol",
            "role",
        ),
        (f"workers:\n- {WORKER}\n- {{{WORKER}, nam: b}}", ":3: workers[1].nam", "name"),
        ("classes:\n  fast: {ttft: 3}", ":2: classes.fast.ttft", "ttft_ms"),
        ("limits:\n  que: 3", ":2: limits.que", "queue"),
        ("tenants:\n- {name: a, keyenv: K}", ":2: tenants[0].keyenv", "key_env"),
        ("admin: {key: K}", ":1: admin.key", "key_env"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path: Path, text: str, place: str, near: str) -> None:
    assert refusal(tmp_path, text) == f"{place}: unknown key; did you mean '{near}'?"


def test_unknown_key_like_nothing_lists_what_is_known(tmp_path: Path) -> None:
    assert refusal(tmp_path, "limits: {zzz: 1}").endswith(
        "known here: max_body_bytes, queue, attempts, max_wait_s, connect_s, first_byte_s, "
        "idle_s, drain_s"
    )


@pytest.mark.parametrize(
    "text,place,mend",
    [
        ("listen: nonsense", "listen", "write host:port"),
        ("listen: 127.0.0.1:65536", "listen", "write host:port"),
        ("listen: ':8000'", "listen", "write host:port"),
        ("listen: '::1:8000'", "listen", "write host:port"),
        ("listen: '[::zz]:8000'", "listen", "write host:port"),
        ("listen: [1]", "listen", "write host:port"),
        ("models: 3", "models", "write models by name"),
        ("models: {m: }", "models.m", "write models by name"),
        ("models: {m: {workers: []}}", "models.m.workers", "write a list of workers"),
        ("models: {m: {}}", "models.m.workers", "write a list of workers"),
        ("models: {7: {workers: []}}", "models[7]", "write models by name"),
        ("workers: [{url: 'ftp://x'}]", "workers[0].url", "like http://10.0.0.5:8000"),
        ("workers: [{url: 'http://'}]", "workers[0].url", "like http://10.0.0.5:8000"),
        ("workers: [{url: 5}]", "workers[0].url", "like http://10.0.0.5:8000"),
        (f"workers: [{{{WORKER}, role: pre}}]", "workers[0].role", "prefill, decode, aggregated"),
        (
            "workers: [{start: 'x {port}', start_timeout_s: 0}]",
            "workers[0].start_timeout_s",
            "seconds above 0",
        ),
        (f"workers: [{{{WORKER}, name: 'a,b'}}]", "workers[0].name", "a short name"),
        (f"workers: [{{{WORKER}, courier: ''}}]", "workers[0].courier", "address of the courier"),
        (f"workers: [{{{WORKER}, model: ''}}]", "workers[0].model", "the model's name"),
        ("classes: {}", "classes", "classes by name"),
        ("classes: {interactive: {ttft_ms: 0}}", "classes.interactive.ttft_ms", "above 0"),
        ("classes: {interactive: {tpot_ms: fast}}", "classes.interactive.tpot_ms", "above 0"),
        ("classes: {interactive: {tpot_ms: .nan}}", "classes.interactive.tpot_ms", "above 0"),
        ("classes: {interactive: {deadline_ms: yes}}", "classes.interactive.deadline_ms", "above"),
        ("classes: {interactive: {deadline_s: .inf}}", "classes.interactive.deadline_s", "above"),
        ("default_class: [x]", "default_class", "name of one of the classes"),
        ("policy: 3", "policy", "one of "),
        ("tenants: [{name: a}]", "tenants[0].key_env", "environment variable"),
        ("tenants: [{name: a, key_env: 1K}]", "tenants[0].key_env", "environment variable"),
        ("tenants: [{name: a, key_env: K, weight: -1}]", "tenants[0].weight", "a share above 0"),
        (
            "tenants: [{name: a, key_env: K, tokens_per_minute: 0.5}]",
            "tenants[0].tokens_per_minute",
            "whole tokens",
        ),
        ("admin: secret", "admin", "{key_env: NAME_OF_A_VARIABLE}"),
        ("limits: {max_body_bytes: 1e9}", "limits.max_body_bytes", "whole number of bytes"),
        ("limits: {queue: 0}", "limits.queue", "waiting requests above 0"),
        ("limits: {attempts: true}", "limits.attempts", "whole number of tries"),
        ("limits: {max_wait_s: -1}", "limits.max_wait_s", "seconds above 0"),
        ("limits: {connect_s: 0}", "limits.connect_s", "seconds above 0"),
        ("limits: {first_byte_s: x}", "limits.first_byte_s", "seconds above 0"),
        ("limits: {idle_s: }", "limits.idle_s", "seconds above 0"),
        ("limits: {drain_s: [1]}", "limits.drain_s", "seconds above 0"),
        ("limits: 3", "limits", "a block of limits"),
        ("event_log: [x]", "event_log", "path of a file"),
        ("report_interval_s: 0", "report_interval_s", "seconds above 0"),
    ],
)
def test_bad_value_names_place_and_mend(tmp_path: Path, text: str, place: str, mend: str) -> None:
    message = refusal(tmp_path, text)
    assert message.startswith(f":1: {place}: ")
    assert "; " in message
    assert mend in message


@pytest.mark.parametrize(
    "text,said",
    [
        ("workers: [{role: decode}]", "either url or start; write one of the two"),
        (f"workers: [{{{WORKER}, start: 'x {{port}}'}}]", "either url or start"),
        (f"workers: [{{{WORKER}, start_timeout_s: 9}}]", "start_timeout_s needs start; leave it"),
        ("workers: [{start: vllm serve}]", "put {port} where the command takes its port"),
        ("classes: {interactive: {deadline_ms: 1, deadline_s: 1}}", "write one of the two"),
        ("classes: {a: {}, b: {}}", "'interactive' is no class here; name one of a, b"),
        ("default_class: b", "name one of interactive, agent, batch"),
        ("policy: slak", "policy 'slak' is unknown; did you mean 'slack'?"),
        (f"workers: [{{{WORKER}}}, {{{WORKER}}}]", "is there twice; take one out"),
        ("workers: [{url: a, name: n}, {url: b, name: n}]", "worker name n is there twice"),
        ("tenants: [{name: a, key_env: A}, {name: a, key_env: B}]", "tenant a is there twice"),
        (f"models: {{m: {{workers: [{{{WORKER}, model: o}}]}}}}", "leave its model out"),
    ],
)
def test_keys_that_contradict_each_other(tmp_path: Path, text: str, said: str) -> None:
    message = refusal(tmp_path, text)
    assert said in message
    assert ";" in message


def test_a_misspelt_key_comes_before_the_one_it_left_missing(tmp_path: Path) -> None:
    message = refusal(tmp_path, "tenants: [{nmae: a, key_env: K}]")
    assert message == ":1: tenants[0].nmae: unknown key; did you mean 'name'?"


@pytest.mark.parametrize(
    "text,said",
    [
        ("a: [", ":1: it is no valid YAML"),
        ("listen: 1\n\tpolicy: x", ":2: it is no valid YAML"),
        ("listen: 1\npolicy: x\nlisten: 2", ":3: listen: this key is there twice; keep one"),
        ("- listen", ":1: it holds a list where keys belong"),
        ("text", ":1: it holds a str where keys belong"),
        ("a: \x07", ": it is no valid YAML"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, said: str) -> None:
    assert refusal(tmp_path, text).startswith(said)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no such file; name an existing one"):
        load(tmp_path / "none.yaml")
    with pytest.raises(SettingsError, match=r"cannot be read .*; name a YAML file"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4")
    with pytest.raises(SettingsError, match="cannot be read"):
        load(tmp_path / "latin.yaml")


def test_long_values_are_cut(tmp_path: Path) -> None:
    assert len(refusal(tmp_path, f"report_interval_s: {'x' * 5000}")) < 200


def test_settings_that_come_from_no_file_name_only_the_place() -> None:
    with pytest.raises(SettingsError) as caught:
        build({"limits": {"queue": 0}})
    assert str(caught.value).startswith("limits.queue: 0 does not fit; ")
