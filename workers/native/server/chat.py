"""`/v1/chat/completions`: body to generation, tokens to answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from workers.native.engine.engine import Generation
from workers.native.engine.sequence import Token
from workers.native.handoff.reference import HandoffReference
from workers.native.server.errors import bad_request
from workers.native.server.fields import ChatFields
from workers.native.server.generation import OutputStream
from workers.native.server.replies import DONE, Head, chat_logprobs, event, usage
from workers.native.server.service import Service


class ChatAnswer:
    """One chat request. `wishes` gives its generations; the rest makes its reply."""

    def __init__(self, service: Service, fields: ChatFields) -> None:
        service.check_model(fields.model)
        if fields.top_logprobs and not fields.logprobs:
            raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
        self._service = service
        self.fields = fields
        kind = "chat.completion.chunk" if fields.stream else "chat.completion"
        self._head = Head("chatcmpl", kind, fields.model)

    async def wishes(
        self, stream: OutputStream, source: HandoffReference | None
    ) -> list[Generation]:
        """Return the one generation that this request asks for."""
        fields, service = self.fields, self._service
        prompt = await service.chat_prompt(fields)
        max_tokens = service.engine.check_size(len(prompt), fields.token_limit)
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        return [
            Generation(
                request_id=stream.new_id(),
                prompt=prompt,
                params=fields.sampling(max_tokens, service.vocab_size, logprobs),
                sink=stream.take,
                choices=fields.choices,
                salt=(fields.cache_salt or "").encode(),
                source=source,
                priority=fields.priority or 0,
            )
        ]

    async def whole(self, stream: OutputStream) -> dict[str, Any]:
        """Collect the answer into one object."""
        tokens: dict[int, list[Token]] = defaultdict(list)
        async for token in stream.tokens():
            tokens[token.index].append(token)
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(t.text for t in tokens[index])},
                "logprobs": self._logprobs(tokens[index]),
                "finish_reason": tokens[index][-1].finish,
            }
            for index in sorted(tokens)
        ]
        count = sum(len(each) for each in tokens.values())
        return self._head.body(
            choices, usage=usage(stream.prompt_tokens, stream.cached_tokens, count)
        )

    async def chunks(self, stream: OutputStream) -> AsyncIterator[bytes]:
        """Yield server-sent events as tokens come."""
        more = {"usage": None} if self.fields.wants_usage else {}
        begun: set[int] = set()
        count = 0
        async for token in stream.tokens():
            count += 1
            if token.index not in begun:
                begun.add(token.index)
                role = {"role": "assistant", "content": ""}
                yield event(self._head.body([self._choice(token.index, role)], **more))
            if not token.text and token.logprob is None and token.finish is None:
                continue
            delta = {"content": token.text} if token.text else {}
            choice = self._choice(token.index, delta, token)
            yield event(self._head.body([choice], **more))
        if self.fields.wants_usage:
            counted = usage(stream.prompt_tokens, stream.cached_tokens, count)
            yield event(self._head.body([], usage=counted))
        yield DONE

    def _choice(
        self, index: int, delta: dict[str, str], token: Token | None = None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs([token]) if token else None,
            "finish_reason": token.finish if token else None,
        }

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        return chat_logprobs(self._service.tokenizer, tokens) if self.fields.logprobs else None
