"""`splitserve demo`: one question to a real model, prefilled here and decoded there."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from router.cli.errors import CommandFailed
from router.cli.up import DEFAULT_MODEL, Model, ReadySeconds, Threads, show_workers

if TYPE_CHECKING:
    from router.cli.router_client import StreamedAnswer
    from router.cli.stack import Stack

_QUESTION = "Why is the sky blue? Explain it to a child in three sentences."
_MAX_TOKENS = 96


def demo(
    model: Model = DEFAULT_MODEL,
    question: Annotated[str, typer.Option(help="What to ask.")] = _QUESTION,
    threads_per_worker: Threads = 0,
    ready_s: ReadySeconds = None,
) -> int:
    """Start a prefill worker, a decode worker and a router, ask one question, stop everything."""
    from router.cli.local_workers import NativeWish, native_plan
    from router.cli.options import router_settings
    from router.cli.serving import interrupt_on_signals
    from router.cli.stack import run_stack
    from workers.launch.ports import free_ports

    interrupt_on_signals()
    answered = threading.Event()
    counts = {"prefill": 1, "decode": 1, "aggregated": 0}
    wish = NativeWish(model, counts, threads_per_worker)
    settings = router_settings(None, port=free_ports(["127.0.0.1"])[0])
    plan = native_plan(settings, wish).allowing(ready_s)

    def work(stack: Stack) -> None:
        show_workers(stack)
        _ask(stack, wish.served_name, question)
        answered.set()

    status = run_stack(plan, work)
    if not answered.is_set():
        raise CommandFailed("the demo ended before its question was answered; run it again")
    return status


def _ask(stack: Stack, model: str, question: str) -> None:
    from router.cli.console import stdout_console
    from router.cli.decision import candidates_table, outcome_table, summary
    from router.cli.router_client import RouterClient

    console = stdout_console()
    console.print(f"\nYou: {question}\n{model}: ", end="", markup=False)

    def show(text: str) -> None:
        console.out(text, end="", highlight=False)
        console.file.flush()

    with RouterClient(stack.url) as client:
        answer = client.ask(model, question, _MAX_TOKENS, show)
        console.print(f"\n\n{_pace(answer)}\n", markup=False)
        record = client.finished_decision(answer.request_id)
    console.print(outcome_table(console, record))
    console.print()
    console.print(candidates_table(console, record))
    console.print(f"\n{summary(record)}", markup=False)
    _require_split(record)


def _pace(answer: StreamedAnswer) -> str:
    return (
        f"Streamed token by token: {answer.output_tokens} tokens in "
        f"{len(answer.token_times_s)} pieces, the first after {answer.ttft_ms:.0f} ms, "
        f"then {answer.tokens_per_s:.1f} tokens/s"
    )


def _require_split(record: dict[str, Any]) -> None:
    workers = (record.get("chosen") or {}).get("workers") or {}
    if not {"prefill", "decode"} <= set(workers):
        raise CommandFailed(
            f"the request was not split, it ran on {workers or 'nobody'}; "
            "see 'Plans considered' for the reason and read the workers' logs"
        )
