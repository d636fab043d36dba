"""Turns a stream of tokens into a stream of text, never showing half a character."""

from __future__ import annotations

import codecs
from typing import Protocol

from workers.native.models.token_pieces import TokenPieces


class TokenSource(Protocol):
    """What the detokenizer needs of a tokenizer."""

    @property
    def pieces(self) -> TokenPieces:
        """How tokens spell text."""

    def token_string(self, token_id: int) -> str | None:
        """The stored spelling of a token, None for an unknown id."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of the text."""


class IncrementalDetokenizer:
    """Feed token ids with `push`, end with `flush`.

    The texts returned, put together, are `tokenizer.decode(all ids, skip_special_tokens=True)`.
    Each token costs time in proportion to its own length. An incomplete UTF-8 sequence is held
    until it is complete or shown to be invalid; a run of SentencePiece byte tokens is held until
    the run ends, since one wrong byte turns the whole run into replacement characters.
    """

    def __init__(
        self,
        tokenizer: TokenSource,
        *,
        skip_special_tokens: bool = True,
        at_text_start: bool = True,
    ) -> None:
        """With `at_text_start=False` the text continues a prompt: a leading space is kept even
        where the tokenizer would strip one from the start of a text.
        """
        self._tokenizer = tokenizer
        self._pieces = tokenizer.pieces
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._byte_run = bytearray()
        spelling = self._pieces.spelling
        self._strippable = spelling.strip_leading_spaces if at_text_start else 0
        self._spaceless = spelling.spaceless_start and at_text_start

    def push(self, token_id: int) -> str:
        """The text that becomes certain with this token; often empty or several characters."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        token = self._tokenizer.token_string(token_id)
        if token is None:
            return ""
        if self._pieces.spelling.byte_level:
            return self._utf8.decode(self._pieces.to_bytes(token))
        byte = self._pieces.raw_byte(token)
        if byte is not None:
            self._byte_run.append(byte)
            return ""
        if self._spaceless:
            token, self._spaceless = token.replace(self._pieces.spelling.space, ""), False
        text = self._end_byte_run() + self._pieces.to_bytes(token).decode("utf-8")
        return self._strip_start(text)

    def flush(self) -> str:
        """The text still held; the detokenizer is spent afterwards."""
        if self._pieces.spelling.byte_level:
            return self._utf8.decode(b"", final=True)
        return self._strip_start(self._end_byte_run())

    def _end_byte_run(self) -> str:
        """As the `ByteFallback` decoder: the run's text, or one replacement character per byte."""
        run = bytes(self._byte_run)
        self._byte_run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return "\N{REPLACEMENT CHARACTER}" * len(run)

    def _strip_start(self, text: str) -> str:
        while self._strippable and text:
            if not text.startswith(" "):
                self._strippable = 0
                break
            text = text[1:]
            self._strippable -= 1
        return text
