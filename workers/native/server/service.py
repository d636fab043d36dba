"""What the routes share: the engine, the tokenizer, names, and how prompts become token ids."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from workers.native.engine.engine import Engine
from workers.native.handoff.reference import HandoffReference
from workers.native.models.errors import ChatTemplateError, TextError
from workers.native.models.tokenizer import Tokenizer
from workers.native.server.errors import ApiError, bad_request, unsupported
from workers.native.server.fields import ChatFields, CompletionFields

HANDOFF_HEADER = "x-splitserve-handoff"
PRIORITY_HEADER = "x-splitserve-priority"
_INLINE_CHARACTERS = 2000  # longer texts are tokenised off the event loop


@dataclass(frozen=True, slots=True)
class Service:
    """One loaded model and its engine.

    `role` is what the worker tells the router it is for; `instance` names this process, so that a
    router notices a restart behind the same address.
    """

    engine: Engine
    tokenizer: Tokenizer
    model_name: str
    model_hash: str
    vocab_size: int
    role: str
    handoff_port: int
    started_s: float
    version: str
    instance: str

    def check_model(self, name: str) -> None:
        """Raise ApiError 404 for a model this worker does not have."""
        if name != self.model_name:
            message = (
                f"the model '{name[:100]}' does not exist here; "
                f"this worker serves '{self.model_name}'"
            )
            raise ApiError(404, message, code="model_not_found", param="model")

    async def chat_prompt(self, fields: ChatFields) -> list[int]:
        """Render the chat template and tokenise it."""
        messages = [_text_message(number, each) for number, each in enumerate(fields.messages)]
        add = fields.add_generation_prompt is not False
        more = {"add_generation_prompt": add, **(fields.chat_template_kwargs or {})}
        if taken := {"messages", "self"} & more.keys():
            raise bad_request(
                f"'chat_template_kwargs.{taken.pop()}' is taken; remove it", "chat_template_kwargs"
            )

        def render() -> list[int]:
            text = self.tokenizer.apply_chat_template(messages, **more)
            return self.tokenizer.encode(text, add_special_tokens=False)

        try:
            return await self._off_loop(render, sum(len(m["content"] or "") for m in messages))
        except ChatTemplateError as error:
            raise bad_request(str(error), "messages", "chat_template_error") from error
        except TextError as error:
            raise bad_request(str(error), "messages", "invalid_text") from error

    async def completion_prompts(self, fields: CompletionFields) -> list[list[int]]:
        """Tokenise every prompt; ids are checked and taken as they are."""
        if not fields.prompts:
            raise bad_request("'prompt' is empty; give at least one", "prompt", "invalid_value")
        prompts = [await self._completion_prompt(entry) for entry in fields.prompts]
        if any(not prompt for prompt in prompts):
            raise bad_request("a prompt has no tokens; give at least one", "prompt", "empty_prompt")
        return prompts

    async def _completion_prompt(self, entry: str | list[int]) -> list[int]:
        if isinstance(entry, str):
            return await self._off_loop(lambda: self.tokenizer.encode(entry), len(entry))
        for token in entry:
            if not 0 <= token < self.vocab_size:
                raise bad_request(
                    f"'prompt': {token} is not a token id below {self.vocab_size}", "prompt"
                )
        return entry

    async def tokenize(self, prompt: str, *, special: bool) -> list[int]:
        """Token ids of a text."""
        return await self._off_loop(
            lambda: self.tokenizer.encode(prompt, add_special_tokens=special), len(prompt)
        )

    @staticmethod
    async def _off_loop(make: Any, characters: int) -> list[int]:
        ids = await asyncio.to_thread(make) if characters > _INLINE_CHARACTERS else make()
        return list(ids)

    @staticmethod
    def priority_from(header: str | None, given: int | None) -> int | None:
        """A router's word on priority goes before the client's own."""
        known = header is not None and header.lstrip("-").isdecimal()
        return max(-1000, min(1000, int(header))) if known and header else given

    @staticmethod
    def handoff_from(header: str | None) -> HandoffReference | None:
        """Read the hand-off a router attached. Raises HandoffRefused when it is damaged."""
        return None if header is None else HandoffReference.decode(header)


def _text_message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Check one message and fold its text parts into one string."""
    where = f"messages[{number}]"
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise bad_request(f"'{where}.role' must be a non-empty string", "messages")
    for field in ("tool_calls", "function_call", "audio"):
        if message.get(field):
            raise unsupported(f"{where}.{field}", "use a worker with another engine")
    if isinstance(content, list):
        content = "".join(_part_text(f"{where}.content[{i}]", p) for i, p in enumerate(content))
    if not isinstance(content, str):
        raise bad_request(f"'{where}.content' must be a string or a list of parts", "messages")
    return {**message, "content": content}


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind != "text":
        if isinstance(kind, str):
            raise unsupported(f"{where}.type={kind[:40]}", "this engine reads text only")
        raise bad_request(f"'{where}' must be an object with a 'type'", "messages")
    if not isinstance(part.get("text"), str):
        raise bad_request(f"'{where}.text' must be a string", "messages")
    return str(part["text"])
