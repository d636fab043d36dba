"""`tokens_per_minute` of tenants: a token bucket each, filled all the time, a minute's worth deep.

A request is let in when the bucket holds its estimated prompt, which is taken at once. At its end
it is settled with what was used: the prompt as the engine counted it, and the answer. An answer
may take a bucket below nothing; its tenant waits then until that is paid off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.api.errors import ApiError
from router.sections import Tenant
from router.telemetry.records import Record


@dataclass(slots=True)
class _Bucket:
    """`level_tokens` as of `filled_s`."""

    limit_tokens: int
    level_tokens: float
    filled_s: float

    def fill(self, now_s: float) -> None:
        gained = (now_s - self.filled_s) * self.limit_tokens / 60
        self.level_tokens = min(float(self.limit_tokens), self.level_tokens + gained)
        self.filled_s = now_s

    def wait_s(self, tokens: float) -> float:
        """Seconds until it holds `tokens`."""
        return max(0.0, tokens - self.level_tokens) * 60 / self.limit_tokens


class Budgets:
    """The buckets of those tenants that have a limit."""

    def __init__(self, tenants: Iterable[Tenant], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._buckets = {
            tenant.name: _Bucket(tenant.tokens_per_minute, tenant.tokens_per_minute, clock())
            for tenant in tenants
            if tenant.tokens_per_minute is not None
        }

    def admit(self, tenant: str, prompt_tokens: int) -> None:
        """Take a prompt from a tenant's bucket. Raises ApiError 429 with the time to wait.

        A prompt larger than a minute's worth needs a full bucket, or it would never get in.
        """
        bucket = self._buckets.get(tenant)
        if bucket is None:
            return
        bucket.fill(self._clock())
        wait_s = bucket.wait_s(min(prompt_tokens, bucket.limit_tokens))
        if wait_s > 0:
            raise ApiError(
                429,
                f"tenant {tenant} has used its budget of {bucket.limit_tokens} tokens per minute; "
                f"try again in {math.ceil(wait_s)} s or ask the operator for more",
                code="budget_used",
                retry_after_s=math.ceil(wait_s),
            )
        bucket.level_tokens -= prompt_tokens

    def settle(self, tenant: str, prompt_tokens: int, record: Record) -> None:
        """A request that was let in has ended: take what it used in place of the estimate."""
        bucket = self._buckets.get(tenant)
        if bucket is None:
            return
        used = record.output_tokens
        if record.attempts:
            used += record.prompt_tokens or prompt_tokens
        bucket.fill(self._clock())
        bucket.level_tokens += prompt_tokens - used
