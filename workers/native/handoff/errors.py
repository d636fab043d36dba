"""What can go wrong between two workers.

HandoffError
├── HandoffRefused     the prefill worker said no: unknown, expired, taken, or a KV that differs
├── HandoffBroken      the connection or the peer died, or went silent
└── HandoffCorrupt     bytes arrived that are not what was promised
"""

from __future__ import annotations


class HandoffError(Exception):
    """A hand-off that did not happen. The request may be prefilled again; its KV is not used."""

    code = "handoff_failed"


class HandoffRefused(HandoffError):
    """The prefill worker refused; the message is its reason."""

    code = "handoff_refused"


class HandoffBroken(HandoffError):
    """The link or the peer failed before everything was across."""

    code = "handoff_broken"


class HandoffCorrupt(HandoffError):
    """Length, order or checksum of what arrived is wrong."""

    code = "handoff_corrupt"
