"""Errors of the measurements; each is one line that names the thing, the cause and the mend.

BenchmarkError
├── NotMeasurable    this machine lacks what the measurement reads
├── SystemFailed     a system under test did not start, or ended
├── PeerMissing      a program to compare with is not there and could not be installed
├── LoadFailed       a system under test did not give the whole right answer
└── InstallFailed    an engine to test against could not be installed
"""


class BenchmarkError(Exception):
    """Root of what a measurement raises on purpose."""


class NotMeasurable(BenchmarkError):
    """This machine lacks what the measurement reads."""


class SystemFailed(BenchmarkError):
    """A system under test did not start, or ended."""


class PeerMissing(BenchmarkError):
    """A program to compare with is not there and could not be installed."""


class LoadFailed(BenchmarkError):
    """A system under test did not give the whole right answer."""


class InstallFailed(BenchmarkError):
    """An engine to test against could not be installed."""
