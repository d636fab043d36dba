"""From the engine's thread to the event loop: one request's outputs, in order."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from types import TracebackType

from workers.native.engine.engine import Engine, Generation
from workers.native.engine.sequence import Failed, Output, PromptLogprobs, PromptReport, Token


class OutputStream:
    """Outputs of one HTTP request, which may hold several prompts. Aborts what is left on exit.

    Use as `async with`; `async for` gives outputs until every choice has finished. A failure of
    any prompt is raised.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Output] = asyncio.Queue()
        self._ids: list[str] = []
        self._open_choices = 0
        self.reports: list[PromptReport] = []
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}

    @staticmethod
    def new_id() -> str:
        """Return an id for one prompt, unknown to clients."""
        return uuid.uuid4().hex

    def take(self, output: Output) -> None:
        """Sink for the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, output)
        except RuntimeError:  # the loop is closed: the server is gone, and so is the client
            return

    def start(self, wish: Generation) -> None:
        """Queue a prompt whose sink is this stream."""
        self._engine.generate(wish)
        self._ids.append(wish.request_id)
        self._open_choices += wish.choices

    async def next_output(self) -> Output:
        """Wait for one output, whatever it is."""
        return await self._queue.get()

    async def __aenter__(self) -> OutputStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._open_choices:
            for request_id in self._ids:
                self._engine.abort(request_id)

    async def tokens(self) -> AsyncIterator[Token]:
        """Yield tokens of all choices as they come; keep prompt reports on the side."""
        while self._open_choices:
            output = await self._queue.get()
            match output:
                case PromptReport():
                    self.reports.append(output)
                case PromptLogprobs():
                    self.prompt_logprobs[output.index] = output
                case Failed(failure):
                    raise failure
                case Token():
                    if output.finish is not None:
                        self._open_choices -= 1
                    yield output

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all prompts, each counted once."""
        return sum(report.prompt_tokens for report in self.reports)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from this worker's prefix cache."""
        return sum(report.cached_tokens for report in self.reports)
