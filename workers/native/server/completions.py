"""`/v1/completions`: one or several prompts, with `echo` and `logprobs`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from workers.native.engine.engine import Generation
from workers.native.engine.sequence import Token
from workers.native.handoff.reference import HandoffReference
from workers.native.server.errors import bad_request
from workers.native.server.fields import DEFAULT_COMPLETION_TOKENS, CompletionFields
from workers.native.server.generation import OutputStream
from workers.native.server.replies import (
    DONE,
    Head,
    LogprobEntry,
    completion_logprobs,
    event,
    usage,
)
from workers.native.server.service import Service


class CompletionAnswer:
    """One completions request over all its prompts."""

    def __init__(self, service: Service, fields: CompletionFields) -> None:
        service.check_model(fields.model)
        if fields.max_tokens == 0 and not fields.echo:
            raise bad_request("'max_tokens' is 0: only with 'echo'", "max_tokens", "invalid_value")
        self._service = service
        self.fields = fields
        self._head = Head("cmpl", "text_completion", fields.model)
        self._prompts: list[list[int]] = []
        self._sent: dict[int, int] = defaultdict(int)

    async def wishes(
        self, stream: OutputStream, source: HandoffReference | None
    ) -> list[Generation]:
        """Return one generation per prompt."""
        fields, service = self.fields, self._service
        self._prompts = await service.completion_prompts(fields)
        if source is not None and (len(self._prompts) > 1 or self._wants_prompt_logprobs):
            raise bad_request("a hand-off carries one prompt without its logprobs", "prompt")
        wanted = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
        return [
            Generation(
                request_id=stream.new_id(),
                prompt=prompt,
                params=fields.sampling(
                    service.engine.check_size(len(prompt), wanted),
                    service.vocab_size,
                    fields.logprobs,
                ),
                sink=stream.take,
                choices=fields.choices,
                first_index=number * fields.choices,
                salt=(fields.cache_salt or "").encode(),
                source=source,
                priority=fields.priority or 0,
                prompt_logprobs=fields.logprobs if self._wants_prompt_logprobs else None,
            )
            for number, prompt in enumerate(self._prompts)
        ]

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return bool(self.fields.echo) and self.fields.logprobs is not None

    async def whole(self, stream: OutputStream) -> dict[str, Any]:
        """Collect the answer into one object."""
        tokens: dict[int, list[Token]] = defaultdict(list)
        async for token in stream.tokens():
            tokens[token.index].append(token)
        choices = []
        for index in sorted(tokens):
            text = self._echo(index) + "".join(t.text for t in tokens[index])
            generated = [t for t in tokens[index] if t.token_id >= 0]
            entries = [*self._echo_entries(stream, index), *_entries(generated)]
            choices.append(self._choice(index, text, tokens[index][-1].finish, entries))
        count = sum(t.token_id >= 0 for each in tokens.values() for t in each)
        counted = usage(stream.prompt_tokens, stream.cached_tokens, count)
        return self._head.body(choices, usage=counted)

    async def chunks(self, stream: OutputStream) -> AsyncIterator[bytes]:
        """Yield server-sent events as tokens come."""
        more = {"usage": None} if self.fields.wants_usage else {}
        begun: set[int] = set()
        count = 0
        async for token in stream.tokens():
            count += token.token_id >= 0
            text, entries = token.text, _entries([token] if token.token_id >= 0 else [])
            if token.index not in begun:
                begun.add(token.index)
                text = self._echo(token.index) + text
                entries = [*self._echo_entries(stream, token.index), *entries]
            if text or token.logprob is not None or token.finish is not None:
                choice = self._choice(token.index, text, token.finish, entries)
                yield event(self._head.body([choice], **more))
        if self.fields.wants_usage:
            counted = usage(stream.prompt_tokens, stream.cached_tokens, count)
            yield event(self._head.body([], usage=counted))
        yield DONE

    def _choice(
        self, index: int, text: str, finish: str | None, entries: list[LogprobEntry]
    ) -> dict[str, Any]:
        logprobs = None
        if self.fields.logprobs is not None:
            logprobs = completion_logprobs(self._service.tokenizer, entries, self._sent[index])
            self._sent[index] += len(text)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _prompt_of(self, index: int) -> int:
        return index // self.fields.choices

    def _echo(self, index: int) -> str:
        if not self.fields.echo:
            return ""
        given = self.fields.prompts[self._prompt_of(index)]
        return given if isinstance(given, str) else self._service.tokenizer.decode(given)

    def _echo_entries(self, stream: OutputStream, index: int) -> list[LogprobEntry]:
        number = self._prompt_of(index)
        told = stream.prompt_logprobs.get(number * self.fields.choices)
        if not self._wants_prompt_logprobs or told is None:
            return []
        prompt = self._prompts[number]
        first: LogprobEntry = (prompt[0], None, ())
        rest = zip(prompt[1:], told.entries, strict=True)
        return [first, *((token_id, chosen, top) for token_id, (chosen, top) in rest)]


def _entries(tokens: list[Token]) -> list[LogprobEntry]:
    return [(token.token_id, token.logprob, token.top) for token in tokens]
