"""Errors of the command line; each is one line on stderr and an exit code.

CliError
├── CommandFailed    the thing asked for failed: exit 1
└── WrongUsage       wrong options or configuration: exit 2
"""

from __future__ import annotations


class CliError(Exception):
    """Root of the command line's errors; its text names the thing, the cause and the mend."""

    exit_code = 1


class CommandFailed(CliError):
    """The thing asked for failed."""


class WrongUsage(CliError):
    """Options that do not go together, or a configuration that cannot be used."""

    exit_code = 2
