"""Requests of a trace: when, how long, what prefix, which targets; and how to reshape them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from splitserve.messages import GenerateRequest, PlanKind, Slo
from splitserve.scheduling.flight import is_batch
from splitserve.simulation.job import HASH_BLOCK_TOKENS

_NO_TARGETS = Slo()
_SHIFT_S = 2.0  # copies of a request come up to this much later


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `at_s` is its scheduled time; sessions release later turns by
    `after_s` behind the end of the turn before. `block_hashes` stand for 512 tokens each.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    service_class: str = "interactive"
    slo: Slo = _NO_TARGETS
    block_hashes: tuple[int, ...] = ()
    session: str = ""
    tenant: str = ""
    after_s: float = 0.0
    max_tokens: int | None = None
    forced_plan: PlanKind | None = None
    forced_worker: str | None = None

    @property
    def batch(self) -> bool:
        """True for a request without latency targets."""
        return is_batch(self.request("", ""))

    def request(self, request_id: str, model: str) -> GenerateRequest:
        """Return what a router would be asked."""
        return GenerateRequest(
            request_id,
            model,
            self.prompt_tokens,
            max_tokens=self.max_tokens,
            service_class=self.service_class,
            slo=self.slo,
            tenant=self.tenant,
            session=self.session,
            block_hashes=self.block_hashes,
            forced_plan=self.forced_plan,
            forced_worker=self.forced_worker,
        )


def window(requests: Iterable[TraceRequest], start_s: float, end_s: float) -> list[TraceRequest]:
    """Return what arrives in [start_s, end_s), times counted from `start_s`.

    Of a session, all turns come along with the first.
    """
    kept: list[TraceRequest] = []
    sessions: dict[str, bool] = {}
    for request in requests:
        inside = start_s <= request.at_s < end_s
        if request.session:
            inside = sessions.setdefault(request.session, inside)
        if inside:
            kept.append(replace(request, at_s=request.at_s - start_s))
    return kept


def scale_rate(
    requests: Iterable[TraceRequest], rate: float, draw: random.Random
) -> list[TraceRequest]:
    """Thin, or repeat with copies shifted by 0 to 2 s. Never compress time: it adds burstiness.

    Whole sessions are kept, dropped or repeated, the copies under names of their own.
    """
    whole, part = divmod(rate, 1.0)
    scaled: list[TraceRequest] = []
    shifts: dict[str, list[float]] = {}
    for request in requests:
        known = shifts.get(request.session) if request.session else None
        if known is None:
            copies = int(whole) + (draw.random() < part)
            known = [draw.uniform(0.0, _SHIFT_S) if n else 0.0 for n in range(copies)]
            if request.session:
                shifts[request.session] = known
        for number, shift_s in enumerate(known):
            scaled.append(_copy(request, number, shift_s))
    return sorted(scaled, key=lambda r: r.at_s)


def _copy(request: TraceRequest, number: int, shift_s: float) -> TraceRequest:
    if number == 0:
        return request
    session = f"{request.session}+{number}" if request.session else ""
    return replace(request, at_s=request.at_s + shift_s, session=session)


def bounded(
    requests: Iterable[TraceRequest], prompt_tokens: int, output_tokens: int
) -> Iterator[TraceRequest]:
    """Cut lengths, as a server with these limits would; clients then name the output limit."""
    for request in requests:
        kept_tokens = max(1, min(request.prompt_tokens, prompt_tokens))
        yield replace(
            request,
            prompt_tokens=kept_tokens,
            block_hashes=request.block_hashes[: -(-kept_tokens // HASH_BLOCK_TOKENS)],
            output_tokens=max(1, min(request.output_tokens, output_tokens)),
            max_tokens=output_tokens,
        )
