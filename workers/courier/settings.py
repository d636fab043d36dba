"""What a courier is told at its start."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from workers.courier.peers import origin_of
from workers.errors import BadSetting

DEFAULT_PORT = 8090
DEFAULT_MAX_BYTES = 8 << 30
DEFAULT_MAX_AGE_S = 300.0


@dataclass(frozen=True, slots=True)
class CourierSettings:
    """Settings of one courier.

    `folder` is the `--slot-save-path` of the llama-server beside it, `model` that server's file.
    `peers` are the couriers it may fetch from (see `Peers`). `examples` is the folder that a vLLM
    worker shares through its ExampleConnector. Files older than `max_age_s` are removed.
    Raises BadSetting for what cannot be used.
    """

    folder: Path
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    key: str = ""
    max_bytes: int = DEFAULT_MAX_BYTES
    max_age_s: float = DEFAULT_MAX_AGE_S
    peers: tuple[str, ...] = ()
    model: Path | None = None
    examples: Path | None = None

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise BadSetting(
                "folder", str(self.folder), "name the folder of llama-server's --slot-save-path"
            )
        if not self.key and not is_loopback(self.host):
            raise BadSetting(
                "host",
                self.host,
                "beyond this machine a courier needs a key; name its variable with --key-env",
            )
        if not 0 <= self.port <= 65535:
            raise BadSetting("port", self.port, "use a number from 0 to 65535")
        if self.max_bytes < 1:
            raise BadSetting("max-bytes", self.max_bytes, "use 1 or more")
        if not self.max_age_s > 0:
            raise BadSetting("max-age-s", self.max_age_s, "use seconds above 0")
        for peer in self.peers:
            if origin_of(peer) is None:
                raise BadSetting("peer", peer, "write it like http://10.0.0.5:8090")
        if self.model is not None and not self.model.is_file():
            raise BadSetting("model", str(self.model), "name the llama-server's GGUF file")
        if self.examples is not None and not self.examples.is_dir():
            raise BadSetting(
                "examples", str(self.examples), "name the vLLM worker's shared_storage_path"
            )
        if self.examples is not None and self.model is None:
            raise BadSetting("examples", str(self.examples), "it needs --model FILE beside it")


def is_loopback(host: str) -> bool:
    """True for an address that only this machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
