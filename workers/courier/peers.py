"""From where files may be fetched: a courier must not become anybody's HTTP client."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from workers.courier.errors import ForeignSource

_PORTS = {"http": 80, "https": 443}


def origin_of(url: str) -> str | None:
    """Return scheme://host:port of a courier's address; None for what is no such address."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        return None
    plain = not (parts.username or parts.password or parts.query or parts.fragment)
    if not parts.hostname or not plain or parts.path not in ("", "/"):
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


class Peers:
    """The sources that may be named in a pull.

    With a list, just those on it. Without one, any for a caller who has shown the key; a courier
    without a key serves whoever is on this machine, so then only this machine's addresses. In any
    case a source is asked for one path of a fixed form, it is shown the file's own ticket and
    never this courier's key, and what it sends is kept only when size and checksum are right.
    """

    def __init__(self, listed: Iterable[str], *, keyed: bool) -> None:
        self._listed = frozenset(filter(None, map(origin_of, listed)))
        self._keyed = keyed

    def check(self, source: str) -> str:
        """Return the origin to fetch from. Raises ForeignSource."""
        origin = origin_of(source)
        if origin is None:
            raise ForeignSource(source)
        if self._listed:
            allowed = origin in self._listed
        else:
            allowed = self._keyed or _is_this_machine(origin)
        if not allowed:
            raise ForeignSource(source)
        return origin


def _is_this_machine(origin: str) -> bool:
    host = urlsplit(origin).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
