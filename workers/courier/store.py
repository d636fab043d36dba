"""The folder of slot files: only names of our own, only so many bytes, only for so long.

Files that are not the router's are never touched, listed or served: people keep slots there too.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from workers.courier.errors import BadFileName, BadSlotFile, FolderFull, NotSealed
from workers.courier.slot_head import SlotLayout, check_head, read_layout

_NAME = re.compile(r"splitserve-[0-9a-f]{32}\.slot")
_OURS = re.compile(r"splitserve-[0-9a-f]{32}\.slot(\.[0-9a-f]{16}\.part)?")
_FOLDER_ID = ".splitserve-folder"
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Promise:
    """What a file must be: its size, its number of tokens and their digest, and its checksum.

    `checksum` is xxh3-128 of the whole file in hex; "" where the file is yet to be read once.
    """

    name: str
    size_bytes: int
    tokens: int
    digest: str
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Seal:
    """A file as it was found, and the ticket with which another courier may fetch it."""

    checksum: str
    ticket: str
    layout: SlotLayout | None


class Store:
    """One folder. Its methods read and write files: call them in a thread."""

    def __init__(self, folder: Path, max_bytes: int, max_age_s: float) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._tickets: dict[str, str] = {}
        self._reserved_bytes: dict[Path, int] = {}
        self.folder_id = _folder_id(folder)

    @property
    def max_bytes(self) -> int:
        """What the folder may hold of the router's files."""
        return self._max_bytes

    def path(self, name: str) -> Path:
        """Return the file's path, whether or not it is there. Raises BadFileName."""
        if not _NAME.fullmatch(name):
            raise BadFileName(name)
        return self._folder / name

    def used_bytes(self) -> int:
        """Bytes of the router's files, those that are still being written in full."""
        unfinished = dict(self._reserved_bytes)  # in one step: other threads write to it
        found = sum(_size_bytes(each) for each in self._ours() if each not in unfinished)
        return found + sum(unfinished.values())

    def seal(self, promise: Promise) -> Seal:
        """Check a file that the engine has saved and make it available to other couriers.

        One that is not what was promised, or that is too much, is deleted. Raises BadSlotFile,
        FolderFull, NotSealed when it is not there, OSError.
        """
        path = self.path(promise.name)
        try:
            checksum = self.check(promise)
            layout = read_layout(path)
            if (used_bytes := self.used_bytes()) > self._max_bytes:
                beside_bytes = used_bytes - promise.size_bytes
                raise FolderFull(promise.size_bytes, beside_bytes, self._max_bytes)
        except BaseException:
            self.discard(promise.name)
            raise
        ticket = self._tickets[promise.name] = secrets.token_hex(16)
        return Seal(checksum, ticket, layout)

    def check(self, promise: Promise, path: Path | None = None) -> str:
        """Return the checksum of a file that is what was promised.

        `path`: where it lies, if not yet under its name. Raises BadSlotFile, NotSealed, OSError.
        """
        path = path or self.path(promise.name)
        try:
            check_head(path, promise.size_bytes, promise.tokens, promise.digest)
            digest = xxhash.xxh3_128()
            with path.open("rb") as file:
                while piece := file.read(_READ_BYTES):
                    digest.update(piece)
        except FileNotFoundError:
            raise NotSealed(promise.name) from None
        checksum = digest.hexdigest()
        if promise.checksum not in ("", checksum):
            raise BadSlotFile(path, "its bytes are not those that were sealed")
        return checksum

    def ticketed(self, name: str, ticket: str) -> Path:
        """Return the path of a sealed file for the bearer of its ticket. Raises NotSealed."""
        path = self.path(name)
        known = self._tickets.get(name)
        if known is None or not hmac.compare_digest(known.encode(), ticket.encode()):
            raise NotSealed(name)
        return path

    @contextlib.contextmanager
    def room(self, name: str, size_bytes: int) -> Iterator[Path]:
        """Hold room for a file and give a temporary path to write it to.

        What lies there at the end is removed, unless `keep` has given it its name. Raises
        FolderFull.
        """
        part = self.path(name).with_name(f"{name}.{secrets.token_hex(8)}.part")
        used_bytes = self.used_bytes()
        if used_bytes + size_bytes > self._max_bytes:
            raise FolderFull(size_bytes, used_bytes, self._max_bytes)
        self._reserved_bytes[part] = size_bytes
        try:
            yield part
        finally:
            del self._reserved_bytes[part]
            part.unlink(missing_ok=True)

    def keep(self, part: Path, name: str) -> None:
        """Give a checked file its name, in one step. Raises OSError."""
        part.replace(self.path(name))

    def discard(self, name: str) -> bool:
        """Delete a file; False when it was not there. Raises BadFileName, OSError."""
        path = self.path(name)
        self._tickets.pop(name, None)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    def sweep(self, now_s: float) -> int:
        """Delete files that nobody came for; `now_s` is the time of day. Returns how many."""
        removed = 0
        for path in self._ours():
            if path in self._reserved_bytes or now_s - _written_s(path, now_s) <= self._max_age_s:
                continue
            self._tickets.pop(path.name, None)
            path.unlink(missing_ok=True)
            removed += 1
        for name in [each for each in list(self._tickets) if not self.path(each).exists()]:
            self._tickets.pop(name, None)
        return removed

    def _ours(self) -> list[Path]:
        return [each for each in self._folder.iterdir() if _OURS.fullmatch(each.name)]


def _size_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:  # gone since it was listed
        return 0


def _written_s(path: Path, otherwise_s: float) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return otherwise_s


def _folder_id(folder: Path) -> str:
    """The id of a folder, which all couriers that share it see. Raises OSError."""
    path = folder / _FOLDER_ID
    fresh = path.with_name(f"{_FOLDER_ID}.{secrets.token_hex(8)}")
    if not path.exists():
        fresh.write_text(secrets.token_hex(16), encoding="ascii")
        try:
            path.hardlink_to(fresh)  # whole at once, and only if nobody else was quicker
        except FileExistsError:
            pass
        except OSError:  # no hard links on this file system
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    return path.read_text(encoding="ascii").strip()
