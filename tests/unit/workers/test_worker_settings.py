"""Settings of a worker, and the command line that carries them to its process."""

import subprocess
import sys

import pytest

from workers.errors import BadSetting
from workers.settings import WorkerSettings, from_arguments, to_arguments


@pytest.mark.parametrize(
    "settings",
    [
        WorkerSettings(model="smollm2-135m"),
        WorkerSettings(
            model="/a folder/with -- odd = name",
            role="prefill",
            host="::1",
            port=0,
            device="cuda:1",
            dtype="bfloat16",
            threads=3,
            kv_tokens=16,
            lease_s=0.25,
            shared_memory=False,
            served_name="-m",
            parent_pid=17,
        ),
    ],
)
def test_arguments_read_back_equal(settings: WorkerSettings) -> None:
    assert from_arguments(to_arguments(settings)) == settings


def test_defaults_need_no_arguments() -> None:
    assert to_arguments(WorkerSettings(model="m")) == ["--model=m"]


@pytest.mark.parametrize(
    "name,value,mend",
    [
        ("role", "ffn", "not in this version; use prefill, decode, aggregated or auto"),
        ("role", "attention", "not in this version"),
        ("role", "drafter", "not in this version"),
        ("role", "cook", "use prefill, decode, aggregated or auto"),
        ("dtype", "int4", "use auto, float32, bfloat16 or float16"),
        ("device", "tpu", "use cpu, cuda or cuda:N"),
        ("port", 65536, "from 0 to 65535"),
        ("lease_s", 0.0, "seconds above 0"),
        ("lease_s", float("nan"), "seconds above 0"),
        ("kv_tokens", 0, "use 1 or more"),
        ("step_tokens", -1, "use 1 or more"),
        ("max_running", 0, "use 1 or more"),
        ("threads", -1, "use 0 or more"),
        ("max_context_tokens", -5, "use 0 or more"),
        ("parent_pid", -1, "use 0 or more"),
    ],
)
def test_bad_values_are_named_with_the_mend(name: str, value: object, mend: str) -> None:
    with pytest.raises(BadSetting) as caught:
        WorkerSettings(model="m", **{name: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{name.replace('_', '-')}: {value!r} cannot be used; ")
    assert mend in str(caught.value)


def test_the_module_refuses_in_one_line() -> None:
    command = [sys.executable, "-m", "workers", "--model=m", "--role=ffn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --role: 'ffn' cannot be used; not in this version")
