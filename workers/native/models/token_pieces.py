"""The bytes behind each token, for the two ways that decoder models spell text.

Byte-level BPE writes each byte as one printable character; SentencePiece writes text with a visible
space and single bytes as `<0x0A>`. Which one, and how text is put together, is read from the
`decoder` of tokenizer.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workers.native.models.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """How tokens spell text.

    `byte_level`: GPT-2's byte alphabet. Otherwise SentencePiece: `space` is written for a space,
    `byte_fallback` says whether `<0xNN>` tokens are bytes, `strip_leading_spaces` spaces are taken
    off the start of the whole text, and with `spaceless_start` the first token shows no spaces.
    """

    byte_level: bool
    space: str = "\N{LOWER ONE EIGHTH BLOCK}"
    byte_fallback: bool = True
    strip_leading_spaces: int = 0
    spaceless_start: bool = False


def spelling_of(decoder: Mapping[str, Any] | None) -> Spelling:
    """Read the `decoder` of a tokenizer.json. Raises UnsupportedModelError for an unknown one."""
    steps = list(_steps(decoder))
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    if kinds == ["Metaspace"]:
        prepends = steps[0].get("prepend_scheme", "always") != "never"
        return Spelling(False, steps[0]["replacement"], False, 0, prepends)
    known = {"Replace", "ByteFallback", "Fuse", "Strip"}
    if "Fuse" not in kinds or not set(kinds) <= known:
        raise UnsupportedModelError(
            f"tokenizer.json has the decoder {'+'.join(kinds) or 'null'}, which is not supported; "
            "supported: ByteLevel, Metaspace, Replace+ByteFallback+Fuse(+Strip)"
        )
    space, strip = Spelling(False).space, 0
    for step in steps:
        if step["type"] == "Replace":
            space = str(step["pattern"]["String"])
        elif step["type"] == "Strip":
            strip = int(step["start"])
    return Spelling(False, space, "ByteFallback" in kinds, strip)


def _steps(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _steps(step)
    else:
        yield decoder


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable character for each byte, by character (`bytes_to_unicode`, OpenAI)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(hidden)}


class TokenPieces:
    """Turns a token's stored spelling into bytes."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self._alphabet = byte_alphabet()

    def raw_byte(self, token: str) -> int | None:
        """The byte of a SentencePiece byte token, None for every other token."""
        if self.spelling.byte_level or not self.spelling.byte_fallback:
            return None
        match = _BYTE_TOKEN.fullmatch(token)
        return None if match is None else int(match[1], 16)

    def to_bytes(self, token: str) -> bytes:
        """The bytes that the token adds to the text."""
        if not self.spelling.byte_level:
            byte = self.raw_byte(token)
            if byte is not None:
                return bytes((byte,))
            return token.replace(self.spelling.space, " ").encode("utf-8")
        try:
            return bytes([self._alphabet[character] for character in token])
        except KeyError:
            # An added token that is written plainly, for example one that holds a space.
            return token.encode("utf-8")
