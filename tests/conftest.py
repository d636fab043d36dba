"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# A deadline measures the machine, not the code: a busy one would fail a right answer.
settings.register_profile("steady", deadline=None)
settings.load_profile("steady")
