"""What travels from the prefill worker over the router to the decode worker: a claim, not KV."""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from workers.native.handoff.errors import HandoffRefused


def hash_prompt(tokens: Sequence[int]) -> str:
    """Fingerprint of a prompt's token ids; both workers compute it for themselves."""
    return hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class HandoffReference:
    """Where an offer waits, and the key that opens it."""

    offer_id: str
    key: str
    host: str
    port: int

    def encode(self) -> str:
        """Return one header-safe word."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @classmethod
    def decode(cls, word: str) -> HandoffReference:
        """Read the word back. Raises HandoffRefused when it is damaged."""
        try:
            fields = json.loads(base64.urlsafe_b64decode(word.encode()))
            return cls(
                str(fields["offer_id"]),
                str(fields["key"]),
                str(fields["host"]),
                int(fields["port"]),
            )
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise HandoffRefused(f"the hand-off reference is damaged: {error!r}") from error
