"""Worker addresses."""

import pytest

from router.errors import BadWorkerUrl
from router.origin import parse_origin


@pytest.mark.parametrize(
    "given, url, authority",
    [
        ("http://10.0.0.5:8000", "http://10.0.0.5:8000", "10.0.0.5:8000"),
        ("http://Mac.Local:8080/", "http://mac.local:8080", "mac.local:8080"),
        ("old-box:11434", "http://old-box:11434", "old-box:11434"),
        ("https://gpu.example", "https://gpu.example:443", "gpu.example"),
        ("http://h:8000/v1", "http://h:8000", "h:8000"),
        ("http://h:8000/engines/a/v1/", "http://h:8000/engines/a", "h:8000"),
        ("http://[::1]:8000", "http://[::1]:8000", "[::1]:8000"),
        ("http://[FDBD:0:0::19D]:8000", "http://[fdbd::19d]:8000", "[fdbd::19d]:8000"),
        ("::1", "http://[::1]:80", "[::1]"),
        ("http://[fe80::1%25eth0]:80", "http://[fe80::1%25eth0]:80", "[fe80::1]"),
        ("http://bücher.example", "http://xn--bcher-kva.example:80", "xn--bcher-kva.example"),
    ],
)
def test_canonical_form(given: str, url: str, authority: str) -> None:
    origin = parse_origin(given)
    assert origin.url == url
    assert origin.authority == authority.encode()
    assert parse_origin(origin.url) == origin


@pytest.mark.parametrize(
    "given, cause",
    [
        ("", "names no host"),
        ("ftp://h:1", "not http or https"),
        ("http://h:99999", "ort"),
        ("http://h:x", "ort"),
        ("http://user:pw@h:1", "user"),
        ("http://h:1?x=1", "query"),
        ("http://[::1", "IPv6"),
        ("http://a..b:1", "not valid"),
    ],
)
def test_unusable_address_says_why_and_how(given: str, cause: str) -> None:
    with pytest.raises(BadWorkerUrl) as caught:
        parse_origin(given)
    text = str(caught.value)
    assert cause in text
    assert "write it like" in text
    assert "\n" not in text
