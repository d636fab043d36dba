"""Free ports."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from workers.launch.errors import PortTaken


def require_free(host: str, port: int) -> None:
    """Raise PortTaken when a server could not listen there now. Port 0 is always free."""
    try:
        _listener(host, port).close()
    except OSError as error:
        raise PortTaken(host, port, error.strerror or str(error), _mend(error)) from error


def _mend(error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return "name an address of this machine with --host"
    if error.errno == errno.EACCES:
        return "choose a port above 1023 with --port"
    return "stop what listens there or choose another with --port"


def free_ports(hosts: Sequence[str]) -> list[int]:
    """Find a free port on each of `hosts`, all different.

    Another process can take one before it is used, so whoever uses it must be ready to try again.
    """
    with ExitStack() as stack:
        listeners = [stack.enter_context(_listener(host, 0)) for host in hosts]
        return [int(each.getsockname()[1]) for each in listeners]


def _listener(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        # As servers do: connections of an earlier server that still linger are no obstacle.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener
