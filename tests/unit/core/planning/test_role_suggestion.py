"""Roles for a fleet that was only probed."""

from dataclasses import replace

import pytest

from splitserve.messages import Role, WorkerSnapshot
from splitserve.planning.suggestion import leaning, pairs, suggest_roles

AUTO = Role.AUTO


def worker(
    name: str,
    prefill_tok_s: float = 0.0,
    decode_tok_s: float = 0.0,
    *,
    role: Role = AUTO,
    connector: str = "native",
    key: str = "weights=w",
    models: tuple[str, ...] = ("m",),
    takes: tuple[str, ...] = (),
) -> WorkerSnapshot:
    return WorkerSnapshot(
        worker_id=name,
        role=role,
        engine="fake",
        models=models,
        connector=connector,
        pairing_key=key,
        prefill_tok_s=prefill_tok_s,
        decode_tok_s=decode_tok_s,
        takes=takes,
    )


def suggested(*workers: WorkerSnapshot) -> dict[str, str]:
    return {name: role.value for name, role in suggest_roles(workers).items()}


def test_who_prefills_fast_for_its_decoding_prefills() -> None:
    assert suggested(worker("mac", 500, 40), worker("gpu", 10_000, 100)) == {
        "mac": "decode",
        "gpu": "prefill",
    }


def test_the_leaning_counts_and_not_the_speed() -> None:
    # twice as fast at everything, yet the slow one has more of its strength in prefill
    assert suggested(worker("slow", 1000, 10), worker("fast", 2000, 100)) == {
        "slow": "prefill",
        "fast": "decode",
    }


def test_several_workers_part_at_the_middle() -> None:
    fleet = [worker(str(ratio), ratio * 10.0, 10.0) for ratio in (10, 90, 12, 100, 110)]
    assert list(suggested(*fleet).values()) == ["decode", "prefill", "decode", "prefill", "prefill"]


def test_equal_or_unknown_speeds_are_left_to_the_planner() -> None:
    assert suggested(worker("a", 1000, 10), worker("b", 1990, 10)) == {"a": "auto", "b": "auto"}
    assert suggested(worker("a", 1000, 10), worker("b", 9000, 0)) == {"a": "auto", "b": "auto"}
    assert suggested(worker("a"), worker("b")) == {"a": "auto", "b": "auto"}


def test_a_worker_without_a_pair_serves_whole_requests() -> None:
    assert suggested(worker("a", 9, 1)) == {"a": "aggregated"}
    fleet = suggested(
        worker("a", 9000, 10),
        worker("b", 100, 10),
        worker("ollama", 9000, 10, connector=""),
        worker("other", 100, 10, key="weights=v"),
    )
    assert fleet == {
        "a": "prefill",
        "b": "decode",
        "ollama": "aggregated",
        "other": "aggregated",
    }


def test_sets_of_workers_are_judged_apart() -> None:
    fleet = suggested(
        worker("a", 9000, 10),
        worker("x", 50, 1, key="v", models=("n",)),
        worker("b", 100, 10),
        worker("y", 5, 1, key="v", models=("n",)),
    )
    assert fleet == {"a": "prefill", "b": "decode", "x": "prefill", "y": "decode"}


@pytest.mark.parametrize("leans_right", [True, False])
def test_a_pair_that_fits_one_way_is_used_that_way_or_not_at_all(leans_right: bool) -> None:
    ratio = 1000.0 if leans_right else 1.0
    vllm = worker("vllm", ratio, 1, connector="example")
    llama = worker("llama", 30, 1, connector="slots", takes=("example",))
    assert suggested(vllm, llama) == (
        {"vllm": "prefill", "llama": "decode"}
        if leans_right
        else {"vllm": "aggregated", "llama": "aggregated"}
    )


def test_a_role_that_the_engine_was_started_with_stands() -> None:
    sglang = worker("p", role=Role.PREFILL)
    assert suggested(sglang, worker("d", role=Role.DECODE)) == {"p": "prefill", "d": "decode"}
    # its partner takes the other side, however it leans
    assert suggested(sglang, worker("x", 9000, 1)) == {"p": "prefill", "x": "decode"}
    assert suggested(worker("d", role=Role.DECODE), worker("x", 1, 9)) == {
        "d": "decode",
        "x": "prefill",
    }


def test_one_side_alone_keeps_its_role_only_where_it_can_do_nothing_else() -> None:
    alone = worker("p", role=Role.PREFILL)
    assert suggested(alone) == {"p": "aggregated"}
    assert suggested(replace(alone, splits_only=True)) == {"p": "prefill"}


def test_pairs_say_why_not_in_both_directions() -> None:
    vllm = worker("vllm", connector="example")
    llama = worker("llama", connector="slots", takes=("example",))
    other = worker("other", connector="example", models=("n",))
    said = {(pair.prefill, pair.decode): pair.why_not for pair in pairs([vllm, llama, other])}
    assert len(said) == 6
    assert said["vllm", "llama"] == ""
    assert said["llama", "vllm"] == "connectors differ: slots and example"
    assert said["vllm", "other"] == (
        "no model has the same name on both (m / n); set model and engine_model"
    )


def test_leaning_needs_both_speeds() -> None:
    assert leaning(worker("a", 100, 10)) == 10
    assert leaning(worker("a", 100)) == leaning(worker("a", 0, 10)) == 0


def test_nobody_gets_no_role() -> None:
    assert suggest_roles([]) == {}
    assert pairs([]) == []
