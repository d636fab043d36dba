"""What workers have refused since they last changed, so that nobody asks them the same again."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.scheduling.ledger import WorkerAccount


@dataclass(slots=True)
class _Least:
    """The least prompt a worker refused, as of its `version`."""

    version: int
    fresh_tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class Refusals:
    """Refusals for the sake of others: of a stall, a slower step, or the memory they need.

    A larger prompt would be refused too: it stalls and slows the others more, and time that passes
    only brings their ends nearer.
    """

    _known: dict[str, _Least] = field(default_factory=dict)

    def cover(self, account: WorkerAccount, fresh_tokens: int, prompt_tokens: int) -> bool:
        """True when the worker has refused a prompt no larger than this one."""
        known = self._known.get(account.worker_id)
        return (
            known is not None
            and known.version == account.version
            and fresh_tokens >= known.fresh_tokens
            and prompt_tokens >= known.prompt_tokens
        )

    def note(self, account: WorkerAccount, fresh_tokens: int, prompt_tokens: int) -> None:
        """The worker has just refused a prompt of this size."""
        known = self._known.get(account.worker_id)
        if known is None or known.version != account.version:
            least = _Least(account.version, fresh_tokens, prompt_tokens)
            self._known[account.worker_id] = least
        elif fresh_tokens + prompt_tokens < known.fresh_tokens + known.prompt_tokens:
            known.fresh_tokens, known.prompt_tokens = fresh_tokens, prompt_tokens
