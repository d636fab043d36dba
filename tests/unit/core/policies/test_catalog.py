"""Policies by name, by name and parameter, and by import path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from splitserve.scheduling.policies.capped import Capped
from splitserve.scheduling.policies.catalog import by_name, names
from splitserve.scheduling.policies.least_requests import LeastRequests
from splitserve.scheduling.policies.slack import Slack
from splitserve.scheduling.policies.static_pd import StaticPD

HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("name", names())
def test_every_name_makes_a_new_policy_each_time(name: str) -> None:
    first, second = by_name(name), by_name(name.replace("-", "_"))
    assert type(first) is type(second)
    assert first is not second


def test_names_and_parameters() -> None:
    assert isinstance(by_name("slack"), Slack)
    assert type(by_name("least-requests")) is type(by_name("least_requests")) is LeastRequests
    thresholds = [by_name(f"static_pd:{tokens}") for tokens in (256, 1000, 2048, 4096)]
    thresholds += [by_name("always-local"), by_name("always-remote")]
    assert [p.threshold_tokens for p in thresholds if isinstance(p, StaticPD)] == [
        256,
        1000,
        2048,
        4096,
        float("inf"),
        0,
    ]
    capped = by_name("capped:24")
    assert isinstance(capped, Capped)
    assert capped.cap == 24


@pytest.mark.parametrize(
    "name,message",
    [
        ("slak", "policy 'slak' is unknown; did you mean 'slack'?"),
        ("least_request", "did you mean 'least-requests'?"),
        ("quantum", "known are slack, least-work"),
        ("", "known are slack"),
        ("static_pd:many", "policy 'static_pd:many': its parameter is a whole number from 0 on"),
        ("capped:0", "its parameter is a whole number from 1 on"),
        ("slack:9", "it takes no parameter"),
        ("dynamo:pool", "its parameter is one of pools"),
        ("statik_pd:1000", "did you mean 'static-pd'?"),
        ("no_such_module:Thing", "cannot be imported: No module named 'no_such_module'"),
        ("json:Thing", "json has no class Thing"),
        ("json.decoder:JSONDecoder", "lacks arrived, left, pump; subclass ImmediatePolicy"),
        ("splitserve.scheduling.policies.immediate:decline_if_hopeless", "has no class"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is compared below
        by_name(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_class_that_needs_arguments_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (HERE / "own_policy_example.py").read_text(encoding="utf-8")
    text += "\n    def __init__(self, depth: int) -> None: ...\n"
    (tmp_path / "needy_policy.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="must be made without arguments"):
        by_name("needy_policy:MostCached")


def test_an_own_policy_is_named_by_its_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    policy = by_name("own_policy_example:MostCached")
    assert type(policy).__name__ == "MostCached"
    assert sys.modules["own_policy_example"].__file__ == str(HERE / "own_policy_example.py")


def test_the_document_quotes_the_example_word_for_word() -> None:
    document = (HERE.parents[3] / "docs/POLICIES.md").read_text(encoding="utf-8")
    example = (HERE / "own_policy_example.py").read_text(encoding="utf-8")
    assert f"```python\n{example}```" in document
    assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_the_document_names_every_policy() -> None:
    document = (HERE.parents[3] / "docs/POLICIES.md").read_text(encoding="utf-8")
    missing = [name for name in names() if f"`{name}" not in document]
    assert missing == []
