"""Rewriting some fields of a body leaves the bytes of all others as they were."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backends.body import fields_of, with_fields

# Values as clients write them, which a parse and a print would change.
WRITTEN = st.sampled_from(
    [
        *("1.0", "1e400", "-1E-7", "-0.0", "0.30000000000000004", "123456789012345678901234567890"),
        *('"\\u00e9"', '"\\ud83e\\udd99"', '"\\/"', '"\\u0000\\n"', '"é世"', '"\\"}"', '""'),
        *("null", "true", "[ 1 , 2 ]", "[]", "{ }", '{"a":1,"a":2}', '{"model": "inner"}'),
        '[[{"a":\t[1.50,null]}]]',
    ]
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SPACE = st.text(" \t\r\n", max_size=2)


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """A JSON object as text, and its fields as they are written there."""
    fields = draw(st.dictionaries(NAMES, WRITTEN, max_size=6))
    space = draw(SPACE)
    parts = [
        f"{space}{json.dumps(name, ensure_ascii=draw(st.booleans()))}{draw(SPACE)}:{draw(SPACE)}"
        f"{written}{draw(SPACE)}"
        for name, written in fields.items()
    ]
    return f"{space}{{{','.join(parts)}{space}}}{space}".encode(), fields


def written(body: bytes) -> dict[str, str]:
    return {name: bytes(raw).decode() for name, raw in fields_of(body).items()}


@given(objects())
def test_fields_are_read_as_they_are_written(case: tuple[bytes, dict[str, str]]) -> None:
    body, fields = case
    assert written(body) == fields


@given(objects(), st.dictionaries(NAMES, st.integers() | st.none() | NAMES, max_size=3))
def test_untouched_fields_keep_their_bytes(
    case: tuple[bytes, dict[str, str]], changes: dict[str, object]
) -> None:
    body, fields = case
    changed = with_fields(body, changes)
    json.loads(changed)
    after = written(changed)
    assert {n: w for n, w in after.items() if n not in changes} == {
        n: w for n, w in fields.items() if n not in changes
    }
    assert {name: json.loads(after[name]) for name in changes} == changes
    assert list(after) == [*fields, *(name for name in changes if name not in fields)]


@given(objects(), st.sets(NAMES, max_size=3))
def test_dropped_fields_are_gone_and_no_other(
    case: tuple[bytes, dict[str, str]], extra: set[str]
) -> None:
    body, fields = case
    drop = {*extra, *list(fields)[::2]}
    kept = {name: w for name, w in fields.items() if name not in drop}
    assert written(with_fields(body, {}, drop)) == kept


def test_a_field_that_is_dropped_and_set_is_set() -> None:
    assert with_fields(b'{"a":1.0}', {"a": 2}, drop=["a"]) == b'{"a":2}'


def test_of_a_name_that_is_there_twice_the_last_counts() -> None:
    """As it does for the parsers of the engines, so nobody is told something else than they."""
    body = b'{"seed":1,"x":1.0,"seed":2.50}'
    assert json.loads(with_fields(body, {})) == json.loads(body)
    assert with_fields(body, {"seed": 3}) == b'{"seed":3,"x":1.0}'


def test_an_escaped_name_is_the_same_name() -> None:
    assert with_fields(b'{"mod\\u0065l":"a","\\u00e9":1}', {"model": "b"}) == (
        '{"model":"b","é":1}'.encode()
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"{", b'{"a":}', b'{"a":1}x'])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        with_fields(body, {"a": 1})
