"""Renders chat templates exactly as transformers does (`utils/chat_template_utils.py`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.native.models.errors import ChatTemplateError

Message = Mapping[str, Any]
# What a template can raise on messages it does not understand, besides jinja2's own errors.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatTemplate:
    """One compiled template. The sandbox gives it no way to files, modules or mutation."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` (`bos_token`, `eos_token`, ...) are variables of the template.

        Raises ChatTemplateError when the template does not parse.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"the model's chat template does not parse ({error}); fix its chat_template.jinja"
            ) from error

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text for `messages`; `variables` reach the template by name.

        Content is a string or a list of `{"type": "text", "text": ...}` parts, joined by newlines.
        Raises ChatTemplateError for content the model cannot take or that the template refuses.
        """
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        scope: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        scope.update(variables)
        scope.update(messages=plain, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(scope)
        except _TEMPLATE_ERRORS as error:
            raise ChatTemplateError(
                f"the model's chat template refused the messages: {error}; "
                "change the roles or their order"
            ) from error


def _plain_message(index: int, message: Message) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"messages[{index}] has no role; give each message a role string")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _content_text(index, plain.get("content", ""))
    return plain


def _content_text(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatTemplateError(
            f"messages[{index}].content is neither a string nor a list of text parts; send text"
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(
                f"messages[{index}].content has a part of type {kind!r}, which this model cannot "
                "read; send parts of type 'text'"
            )
        texts.append(part["text"])
    return "\n".join(texts)


class _GenerationTag(Extension):
    """`{% generation %}` marks assistant text for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's interface)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own filter this does not escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
