"""What the core is told (Events) and what it asks for (Commands).

Everything here is frozen data. The edge makes Events, the `Scheduler` answers with Commands, and
nothing else crosses the border: no sockets, no clock, no callbacks. Times are seconds on whatever
monotonic clock the caller uses; the core never reads one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from splitserve.performance.coefficients import Coefficients


class Role(StrEnum):
    """What a worker is meant to do; `AUTO` lets the planner decide and change it."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    AUTO = "auto"


class PlanKind(StrEnum):
    """Both phases on one worker, or prefill on one and decode on another."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"


class Leg(StrEnum):
    """One of the upstream calls that serve a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"


class Failure(StrEnum):
    """Why a leg ended without its result."""

    UNREACHABLE = "unreachable"  # no connection, or it broke before the first byte
    REFUSED = "refused"  # the engine answered 5xx or 429
    TIMEOUT = "timeout"  # a deadline of the router ran out
    HANDOFF = "handoff"  # the decode worker could not get the KV it was promised
    BROKEN = "broken"  # the stream broke after bytes had gone to the client
    WORKER_LOST = "worker_lost"  # the registry declared the worker dead


class Refusal(StrEnum):
    """Why a request gets no answer; the edge maps each to a status."""

    UNKNOWN_MODEL = "unknown_model"
    NO_WORKER = "no_worker"
    QUEUE_FULL = "queue_full"
    HOPELESS = "hopeless"  # its target cannot be met, and it asked to fail fast
    UNPLANNABLE = "unplannable"  # a forced plan or worker that cannot serve this request
    FAILED = "failed"  # every permitted attempt failed
    BROKEN = "broken"  # it failed after bytes had gone out, so it cannot be tried again


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets of one request, in seconds. None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the scheduler sees it: sizes and wishes, never text.

    `prompt_is_estimate`: the edge guessed `prompt_tokens` from the size of the text; the scheduler
    scales the guess by what answers have shown.
    `tenant_weight` is its tenant's share beside others who wait, above 0; 1 is usual.
    `block_hashes` are chained hashes of the prompt's blocks of `hash_block_tokens` tokens each.
    `fail_fast`: rather a refusal at once than an answer after the target.
    `unsplittable` says why this request must run whole ("" when it may be split). One of
    `several_prompts` is split nevertheless where every worker is `splits_only`.
    `forced_plan` and `forced_worker` come from the client's headers.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int | None = None
    service_class: str = "interactive"
    slo: Slo = Slo()
    tenant: str = ""
    tenant_weight: float = 1.0
    session: str = ""
    block_hashes: tuple[int, ...] = ()
    hash_block_tokens: int = 512
    prompt_is_estimate: bool = False
    streamed: bool = True
    fail_fast: bool = False
    unsplittable: str = ""
    several_prompts: bool = False
    forced_plan: PlanKind | None = None
    forced_worker: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as its last report described it. Stale by one report; the ledger adds the rest.

    `pairing_key` names everything two workers must share to exchange KV (weights, tokenizer,
    layout, dtype, block size); `connector` is the way they exchange it, "" when they cannot.
    `takes` names other engines' connectors whose KV this worker can convert into its own.
    `soft_role`: the planner gave it its role, which is a bias; a declared role is an order.
    `splits_only`: its engine takes one side of hand-offs and cannot answer a request alone.
    `hands_over_logits`: the first token needs no step on the decode worker.
    Rates are priors until the latency model has seen traffic; 0 means unknown. `coefficients` are a
    better prior where somebody has them; `exact` ones are not corrected (simulation only).
    `cache_removed_tokens` and `cache_cleared` are what its prefix cache has let go since it joined,
    and how often all of it, where it tells.
    `notes` tell people what was assumed of it or is odd about it; nothing is decided by them.
    """

    worker_id: str
    role: Role
    engine: str
    models: tuple[str, ...]
    connector: str = ""
    pairing_key: str = ""
    max_running: int = 64
    kv_capacity_tokens: int = 0
    kv_used_tokens: int = 0
    running: int = 0
    waiting: int = 0
    max_context_tokens: int = 0
    kv_bytes_per_token: int = 0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    draining: bool = False
    step_tokens: int = 0
    hands_over_logits: bool = False
    soft_role: bool = False
    coefficients: Coefficients | None = None
    exact: bool = False
    takes: tuple[str, ...] = ()
    splits_only: bool = False
    cache_removed_tokens: int = 0
    cache_cleared: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Handoff:
    """A claim on KV that waits on a prefill worker. Opaque to everything but its connector."""

    handoff_id: str
    worker_id: str
    connector: str
    attributes: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve a request, priced. `why_not` is "" for a plan that may be chosen."""

    plan: PlanKind
    prefill_worker: str
    decode_worker: str
    predicted_ttft_s: float
    predicted_tpot_s: float
    transfer_s: float = 0.0
    why_not: str = ""

    @property
    def feasible(self) -> bool:
        """True when nothing forbids this plan."""
        return not self.why_not


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome of one scheduling decision: every candidate, and the one taken (or None)."""

    candidates: tuple[Candidate, ...] = ()
    chosen: Candidate | None = None


# --- Events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client sent a request; it is queued or started at once."""

    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class HandoffReady:
    """Decode may be dispatched. Connectors that overlap say so while prefill still runs."""

    request_id: str
    attempt: int
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class PrefillFinished:
    """The prefill worker is done with this prompt; `prefill_s` is its own time, not queueing."""

    request_id: str
    attempt: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_s: float = 0.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token-bearing byte arrived from the worker that decodes."""

    request_id: str
    attempt: int
    transfer_bytes: int = 0
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StreamsAdvanced:
    """How far streams have come: (request, attempt, tokens so far, time of the last one).

    The edge gathers them and sends one event some twenty times a second: per-token traffic does
    not pass through the core.
    """

    progress: tuple[tuple[str, int, int, float], ...]


@dataclass(frozen=True, slots=True)
class DecodeFinished:
    """The answer is complete. Token counts are the engine's own, 0 when it told none."""

    request_id: str
    attempt: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LegFailed:
    """A leg ended without its result.

    `final` means that another try cannot mend it: a 4xx, or bytes already sent.
    """

    request_id: str
    attempt: int
    leg: Leg
    worker_id: str
    failure: Failure
    detail: str = ""
    final: bool = False


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The client left, or an operator ended the request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A worker joined, or sent its periodic report."""

    snapshot: WorkerSnapshot


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The registry gave up on a worker, or an operator removed it."""

    worker_id: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PairJudged:
    """What was seen of a pair's hand-offs: no more of them until `until_s`, for `reason`.

    An empty reason lifts what an earlier judgement said.
    """

    prefill_worker: str
    decode_worker: str
    reason: str
    until_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The instant asked for by `WakeAt` has come."""


Event = (
    RequestArrived
    | HandoffReady
    | PrefillFinished
    | FirstToken
    | StreamsAdvanced
    | DecodeFinished
    | LegFailed
    | RequestCancelled
    | WorkerReported
    | WorkerLost
    | PairJudged
    | TimerFired
)


# --- Commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StartAggregated:
    """Run both phases on `worker_id`."""

    request_id: str
    attempt: int
    worker_id: str
    choice: Choice = field(default_factory=Choice)


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Prefill on `worker_id`; `decode_worker_id` is booked already and will pull the KV."""

    request_id: str
    attempt: int
    worker_id: str
    decode_worker_id: str
    choice: Choice = field(default_factory=Choice)


@dataclass(frozen=True, slots=True)
class StartDecode:
    """Decode on `worker_id`, with the KV that `handoff` claims."""

    request_id: str
    attempt: int
    worker_id: str
    handoff: Handoff


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this attempt's leg on `worker_id`; the worker must stop computing for it."""

    request_id: str
    attempt: int
    worker_id: str


@dataclass(frozen=True, slots=True)
class ReleaseKV:
    """The hand-off is over. `consumed`: the decode worker read it, so most connectors freed it."""

    handoff: Handoff
    consumed: bool


@dataclass(frozen=True, slots=True)
class Reject:
    """The request ends without an answer (or, for BROKEN, without the rest of it)."""

    request_id: str
    refusal: Refusal
    detail: str
    retry_after_s: float | None = None
    choice: Choice = field(default_factory=Choice)


@dataclass(frozen=True, slots=True)
class SetRole:
    """Use this worker in another role from now on."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `TimerFired` at `at_s`; a later WakeAt replaces an earlier one."""

    at_s: float


Command = (
    StartAggregated | StartPrefill | StartDecode | Cancel | ReleaseKV | Reject | SetRole | WakeAt
)
