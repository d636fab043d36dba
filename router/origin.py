"""A worker's address, parsed once."""

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from router.errors import BadWorkerUrl

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port of a worker, and a path that precedes every route.

    ``host`` is bare (no brackets) and canonical, so equal addresses make equal origins.
    """

    scheme: str
    host: str
    port: int
    base_path: str = ""
    authority: bytes = field(init=False, compare=False)
    """The Host header's value; IPv6 literals are bracketed and carry no zone."""

    def __post_init__(self) -> None:
        host = self.host.partition("%")[0]
        name = f"[{host}]" if ":" in host else host
        if self.port != DEFAULT_PORTS[self.scheme]:
            name += f":{self.port}"
        object.__setattr__(self, "authority", name.encode("ascii"))

    @property
    def tls(self) -> bool:
        return self.scheme == "https"

    @property
    def url(self) -> str:
        """The canonical URL, without a trailing slash."""
        host = f"[{self.host.replace('%', '%25')}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base_path}"


def parse_origin(url: str) -> Origin:
    """Parse a worker URL; a missing scheme means http, a bare IPv6 literal has no port.

    A trailing slash and a trailing ``/v1`` are dropped: routes carry their own ``/v1``.
    Raises BadWorkerUrl.
    """
    text = url.strip()
    if _is_ipv6(text):
        text = f"[{text}]"
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as exc:
        raise BadWorkerUrl(url, str(exc)) from exc
    if parts.scheme not in DEFAULT_PORTS:
        raise BadWorkerUrl(url, f"scheme {parts.scheme!r} is not http or https")
    if not parts.hostname:
        raise BadWorkerUrl(url, "it names no host")
    if parts.query or parts.fragment or parts.username is not None:
        raise BadWorkerUrl(url, "user, query and fragment have no meaning here")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Origin(
        parts.scheme, _host(url, parts), DEFAULT_PORTS[parts.scheme] if port is None else port, path
    )


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _host(url: str, parts: SplitResult) -> str:
    assert parts.hostname is not None
    host = unquote(parts.hostname)
    if ":" in host:
        return str(ipaddress.IPv6Address(host))
    try:
        return host.encode("idna").decode("ascii").lower()
    except UnicodeError as exc:
        raise BadWorkerUrl(url, f"host name {host!r} is not valid") from exc
