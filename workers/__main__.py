"""`python -m workers --model M --role R ...`: one native worker."""

from __future__ import annotations

import sys

from workers.app import run
from workers.errors import BadSetting
from workers.settings import from_arguments


def main() -> int:
    """Run a worker with this process's arguments. Returns the exit status."""
    try:
        settings = from_arguments(sys.argv[1:])
    except BadSetting as error:
        print(f"error: --{error}", file=sys.stderr)
        return 2
    return run(settings)


if __name__ == "__main__":
    sys.exit(main())
