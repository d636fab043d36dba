"""Text to token ids and back, from a model folder's tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from workers.native.models.chat_template import ChatTemplate, Message
from workers.native.models.detokenizer import IncrementalDetokenizer
from workers.native.models.errors import ChatTemplateError, InvalidModelError, TextError
from workers.native.models.hf_config import read_json
from workers.native.models.token_pieces import TokenPieces, spelling_of

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token")


class Tokenizer:
    """The tokenizer of one model. Safe to use from several threads."""

    def __init__(
        self,
        fast: FastTokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`special_tokens` maps names such as `bos_token` to token text.

        Raises UnsupportedModelError for a decoder that is not known, ChatTemplateError for a
        template that does not parse.
        """
        self._fast = fast
        self.special_tokens = dict(special_tokens or {})
        self.pieces = TokenPieces(spelling_of(json.loads(fast.to_str()).get("decoder")))
        self._special_ids = frozenset(
            index for index, token in fast.get_added_tokens_decoder().items() if token.special
        )
        self._template = (
            None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)
        )

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of `folder`.

        Raises InvalidModelError when tokenizer.json is missing or broken, and as the constructor.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise InvalidModelError(
                f"{path} is missing: the native engine needs the model's fast tokenizer; "
                "pull the model again"
            )
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises nothing narrower
            raise InvalidModelError(f"{path} is not readable ({error}); pull it again") from error
        config = _optional_json(folder / "tokenizer_config.json")
        named = _optional_json(folder / "special_tokens_map.json") | config
        return cls(
            fast,
            special_tokens={
                name: _token_text(named[name]) for name in _SPECIAL_NAMES if named.get(name)
            },
            chat_template=_template_source(folder, config),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how to write a conversation."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` framed as the model's rule says (BOS).

        Raises TextError for text that is not valid Unicode.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TextError(
                f"the text is not valid Unicode at character {error.start} (a lone surrogate); "
                "send valid UTF-8"
            ) from error
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; ids outside the vocabulary add nothing."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`.

        Raises ChatTemplateError (a ValueError) when there is no template or it refuses.
        """
        if self._template is None:
            raise ChatTemplateError(
                "the model has no chat template; use completions or a chat-tuned model"
            )
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **variables
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation: the template writes its own special tokens."""
        text = self.apply_chat_template(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    def token_string(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None for an unknown id."""
        token: str | None = self._fast.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token adds to the text; empty for an unknown id."""
        token = self.token_string(token_id)
        return b"" if token is None else self.pieces.to_bytes(token)

    def token_text(self, token_id: int) -> str:
        """The token's text on its own; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out."""
        return token_id in self._special_ids


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, Mapping) else str(value)


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return None if source is None else str(source)
