"""The splitserve command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `splitserve` with this process's arguments."""
    from router.cli.commands import run

    sys.exit(run(sys.argv[1:]))
