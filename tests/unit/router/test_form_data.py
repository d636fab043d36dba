"""One field of a form, among parts that may hold anything."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.form_data import boundary_of, find_field, with_value

MARK = b"x-boundary"
NAMES = st.sampled_from(["file", "prompt", "language", "stream", "modell"])


def part(name: str, value: bytes, more: str = "") -> bytes:
    head = f'Content-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()
    return b"--" + MARK + b"\r\n" + head + value + b"\r\n"


def form(*parts: bytes, before: bytes = b"", after: bytes = b"\r\n") -> bytes:
    return before + b"".join(parts) + b"--" + MARK + b"--" + after


VALUES = st.binary(max_size=40).filter(lambda value: b"--" + MARK not in value)


@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20),
)
def test_the_field_is_found_and_replaced_and_nothing_else(
    others: list[tuple[str, bytes]], model: str, other_model: str
) -> None:
    half = len(others) // 2
    before = [part(name, value) for name, value in others[:half]]
    behind = [part(name, value) for name, value in others[half:]]
    body = form(*before, part("model", model.encode()), *behind)
    field = find_field(body, MARK, b"model")
    assert field is not None
    assert field.value.decode() == model
    changed = with_value(body, field, other_model.encode())
    assert changed == form(*before, part("model", other_model.encode()), *behind)


def test_a_file_that_looks_like_a_field_is_none() -> None:
    inside = b'\r\ncontent-disposition: form-data; name="model"\r\n\r\nfake\r\n'
    body = form(part("file", inside, '; filename="name=model.wav"'), part("model", b"true"))
    field = find_field(body, MARK, b"model")
    assert field is not None
    assert field.value == b"true"


@pytest.mark.parametrize(
    "body, value",
    [
        (form(part("a", b"1")), None),
        (form(part("model", b"")), b""),
        (form(part("model", b"one"), part("model", b"two")), b"one"),
        (form(part("model", b"m"), before=b"a preamble\r\n"), b"m"),
        (form(part("model", b"m"), after=b""), b"m"),
        (form(part("model", b"m", "\r\nContent-Type: text/plain")), b"m"),
    ],
    ids=["no such field", "empty", "twice", "preamble", "no last line", "more headers"],
)
def test_forms(body: bytes, value: bytes | None) -> None:
    field = find_field(body, MARK, b"model")
    assert (field.value if field is not None else None) == value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"hello",
        b'{"model":"m"}',
        b"--" + MARK,
        b"--" + MARK + b"\r\nno end of the head",
        part("a", b"1")[:-2],
        form(part("a", b"1")).replace(b"--" + MARK + b"--", b""),
        form(*[part("a", b"")] * 300, part("model", b"m")),
        b"--" + MARK + b"\r\nx: " + b"y" * 20_000 + b"\r\n\r\n1\r\n--" + MARK + b"--",
    ],
    ids=["nothing", "text", "json", "mark", "head", "no end", "no mark", "parts", "long head"],
)
def test_what_is_no_form(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        find_field(body, MARK, b"model")


@pytest.mark.parametrize(
    "kind, boundary",
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b'multipart/form-data; charset=utf-8; boundary="a b"', b"a b"),
        (b"multipart/form-data;BOUNDARY=----WebKit7MA4", b"----WebKit7MA4"),
        (b"multipart/form-data; boundary=abc; charset=utf-8", b"abc"),
        (b"multipart/form-data", None),
        (b"multipart/form-data; boundary=", None),
    ],
)
def test_boundaries(kind: bytes, boundary: bytes | None) -> None:
    assert boundary_of(kind) == boundary
