"""Errors of the courier.

CourierError
├── BadSlotFile     a file is no whole slot file of llama.cpp, or of a kind that is not read here
├── KvMissing       another engine's KV for this prompt is not where it should be
├── CannotConvert   another engine's KV cannot become a slot file for this model
├── BadFileName     a name that no file of the router has
├── NotSealed       no file of that name was checked here, or its time is over
├── FolderFull      the file would not fit into what the folder may hold
├── ForeignSource   a file is to come from where none may come from
└── SourceFailed    the other courier did not give the file
"""

from __future__ import annotations

from pathlib import Path

from workers.errors import WorkerError


class CourierError(WorkerError):
    """Root of what the courier raises on purpose; its text is one line with the mend."""


class BadSlotFile(CourierError):
    """A file is no whole slot file of llama.cpp, or of a kind that is not read here."""

    def __init__(self, path: Path, cause: str) -> None:
        super().__init__(f"slot file {path.name} cannot be used: {cause}; save it again")


class KvMissing(CourierError):
    """Another engine's KV for this prompt is not where it should be."""


class CannotConvert(CourierError):
    """Another engine's KV cannot become a slot file for this model."""


class BadFileName(CourierError):
    """A name that no file of the router has."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"file name {name[:80]!r} is not allowed here; use splitserve-, 32 hex digits and .slot"
        )


class NotSealed(CourierError):
    """No file of that name was checked here, or its time is over."""

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no {name} to be had here; save and seal it first")


class FolderFull(CourierError):
    """The file would not fit into what the folder may hold."""

    def __init__(self, size_bytes: int, used_bytes: int, max_bytes: int) -> None:
        super().__init__(
            f"a file of {size_bytes} bytes does not fit beside {used_bytes} of the {max_bytes} "
            "bytes allowed; raise --max-bytes"
        )


class ForeignSource(CourierError):
    """A file is to come from where none may come from."""

    def __init__(self, source: str) -> None:
        super().__init__(
            f"no file is fetched from {source[:200]!r}; name that courier with --peer, "
            "or give this one a key"
        )


class SourceFailed(CourierError):
    """The other courier did not give the file."""

    def __init__(self, source: str, cause: str) -> None:
        super().__init__(f"courier {source}: {cause}; see whether it runs and can be reached")
