"""`splitserve version`."""

from __future__ import annotations


def version() -> None:
    """Print the version."""
    import importlib.metadata

    print(f"splitserve {importlib.metadata.version('splitserve')}")
