"""A worker's sums equal a recount of its bookings, whatever happened in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitserve import messages as m
from splitserve.performance.coefficients import KNOWN
from splitserve.performance.worker_model import WorkerModel
from splitserve.scheduling.ledger import Booking, Ledger, LegKey, Phase, WorkerAccount

SPEED = KNOWN["rtx4090-llama-3.1-8b"]
KEYS: list[LegKey] = [(name, 1, m.Leg.AGGREGATED) for name in "abc"]

operations = st.one_of(
    st.tuples(
        st.just("book"),
        st.sampled_from(KEYS),
        st.sampled_from([Phase.PENDING, Phase.TRANSFER]),
        st.integers(1, 5000),
        st.integers(0, 4000),
        st.booleans(),
    ),
    st.tuples(st.just("first"), st.sampled_from(KEYS)),
    st.tuples(st.just("progress"), st.sampled_from(KEYS), st.integers(0, 900)),
    st.tuples(st.just("unbook"), st.sampled_from(KEYS)),
)


def account() -> WorkerAccount:
    snapshot = m.WorkerSnapshot("w", m.Role.AUTO, "x", ("m",))
    return WorkerAccount(snapshot, WorkerModel(SPEED))


def perform(on: WorkerAccount, operation: tuple[object, ...], now_s: float) -> None:
    match operation:
        case ("book", tuple(key), Phase() as phase, int(fresh), int(cached), bool(batch)):
            if key in on.bookings:
                return
            fresh = 0 if phase is Phase.TRANSFER else fresh
            request = m.GenerateRequest(key[0], "m", max(1, fresh + cached))
            booking = Booking(request, phase, fresh, cached, 2 * fresh, now_s, batch=batch)
            on.book(key, booking)
        case ("first", tuple(key)):
            on.first_token(key, now_s)
        case ("progress", tuple(key), int(tokens)):
            on.progress(key, tokens, now_s)
        case ("unbook", tuple(key)):
            on.unbook(key)
        case _:
            raise AssertionError(operation)


def assert_sums(of: WorkerAccount) -> None:
    bookings = list(of.bookings.values())
    pending = [b for b in bookings if b.phase is Phase.PENDING]
    moving = [b for b in bookings if b.phase is Phase.TRANSFER]
    streams = [b for b in bookings if b.phase is Phase.DECODING]
    batch = [b for b in bookings if b.batch]
    assert of.in_flight == len(bookings)
    assert (of.pending, of.transfers, of.streams) == (len(pending), len(moving), len(streams))
    assert of.streams_soon == len(bookings)
    assert of.pending_prefill_tokens == sum(b.uncached_tokens for b in pending)
    assert of.pending_area == sum(
        b.uncached_tokens * (b.cached_tokens + b.uncached_tokens / 2) for b in pending
    )
    assert of.kv_streams_tokens == sum(b.request.prompt_tokens + b.tokens for b in streams)
    assert of.kv_arriving_tokens == sum(b.request.prompt_tokens for b in (*pending, *moving))
    assert of.kv_soon_tokens == of.kv_streams_tokens + of.kv_arriving_tokens
    assert of.booked_kv_tokens == sum(b.kv_tokens for b in bookings)
    assert of.batch_kv_tokens == sum(b.held_tokens for b in batch)
    assert of.batch_pending == sum(b.batch for b in pending)
    # `alone` tells which first tokens time the worker: nothing else pended at any time beside it
    assert sum(b.alone for b in pending) <= 1
    if len(pending) > 1:
        assert not any(b.alone for b in pending)


@given(st.lists(operations, max_size=80))
def test_sums_equal_a_recount(steps: list[tuple[object, ...]]) -> None:
    ours = account()
    for number, operation in enumerate(steps):
        before, keys = ours.version, dict(ours.bookings)
        perform(ours, operation, 0.01 * number)
        assert_sums(ours)
        if ours.bookings != keys:
            assert ours.version > before
    for key in KEYS:
        ours.unbook(key)
    assert_sums(ours)
    assert ours.pending_area == ours.booked_kv_tokens == ours.batch_kv_tokens == 0


def stream(on: WorkerAccount, name: str) -> LegKey:
    key = (name, 1, m.Leg.AGGREGATED)
    on.book(key, Booking(m.GenerateRequest(name, "m", 100), Phase.PENDING, 100, 0, 100, 0.0))
    on.first_token(key, 0.0)
    return key


def samples(of: WorkerAccount) -> int:
    return of.model.decode_drift.samples


def test_steps_are_learnt_from_the_oldest_stream_while_nobody_comes_or_goes() -> None:
    ours = account()
    oldest, other = stream(ours, "a"), stream(ours, "b")
    ours.progress(oldest, 5, 0.10)
    assert samples(ours) == 0, "the first report only starts the clock"
    ours.progress(other, 9, 0.11)
    ours.progress(oldest, 9, 0.18)
    assert samples(ours) == 1
    newcomer = stream(ours, "c")
    ours.progress(oldest, 13, 0.30)
    assert samples(ours) == 1, "somebody came in between"
    ours.progress(oldest, 17, 0.40)
    assert samples(ours) == 2
    ours.unbook(newcomer)
    ours.progress(oldest, 21, 0.50)
    assert samples(ours) == 2, "somebody left in between"
    ours.unbook(oldest)
    ours.progress(other, 20, 0.60)
    ours.progress(other, 24, 0.70)
    assert samples(ours) == 3, "the next oldest takes over"


def test_nothing_is_learnt_of_steps_while_a_prompt_is_under_way() -> None:
    ours = account()
    oldest = stream(ours, "a")
    request = m.GenerateRequest("p", "m", 500)
    ours.book(("p", 1, m.Leg.AGGREGATED), Booking(request, Phase.PENDING, 500, 0, 500, 0.0))
    ours.progress(oldest, 5, 0.10)
    ours.progress(oldest, 9, 0.20)
    assert samples(ours) == 0


def test_a_report_of_fewer_tokens_than_known_changes_nothing() -> None:
    ours = account()
    key = stream(ours, "a")
    ours.progress(key, 40, 0.1)
    held = ours.kv_streams_tokens
    ours.progress(key, 30, 0.2)
    ours.progress(("unknown", 1, m.Leg.DECODE), 30, 0.2)
    assert ours.kv_streams_tokens == held == 140


def test_a_report_keeps_what_was_booked_and_what_was_learnt() -> None:
    ledger = Ledger()
    snapshot = m.WorkerSnapshot("w", m.Role.AUTO, "x", ("m",), coefficients=SPEED)
    ledger.report(snapshot)
    ours = ledger.workers["w"]
    key = stream(ours, "a")
    for number in range(20):
        ours.progress(key, 2 + number, 0.1 * number)
    learnt = ours.model
    assert learnt.learnt
    ledger.report(m.WorkerSnapshot("w", m.Role.DECODE, "x", ("m", "n"), max_running=3))
    assert ledger.workers["w"] is ours
    assert ours.model is learnt
    assert ours.snapshot.role is m.Role.DECODE
    assert [a.worker_id for a in ledger.serving("n")] == ["w"]
    assert ledger.unbook("w", key) is not None
    assert ledger.unbook("gone", key) is None
