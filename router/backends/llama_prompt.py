"""A client's request as the token ids that a llama-server makes of it."""

from __future__ import annotations

import msgspec

from router.backends.llama_server import LlamaServer

CHAT = b"/v1/chat/completions"
COMPLETIONS = b"/v1/completions"
_USUAL_MARKER = "<__media__>"


class RunsWhole(Exception):
    """A request's KV cannot be handed over. Its text says why."""


class _Body(msgspec.Struct):
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    n: msgspec.Raw = msgspec.Raw(b"")
    n_cmpl: msgspec.Raw = msgspec.Raw(b"")
    lora: msgspec.Raw = msgspec.Raw(b"")


class LlamaPrompt:
    """The part of a body that decides what a slot holds. Raises msgspec.DecodeError."""

    def __init__(self, path: bytes, body: bytes) -> None:
        self._path = path
        self._body = body
        read = msgspec.json.decode(body, type=_Body)
        self.raw = bytes(read.messages if path == CHAT else read.prompt)
        self.choices = max(_count(read.n), _count(read.n_cmpl))
        self.lora = msgspec.Raw(bytes(read.lora)) if bytes(read.lora) else None
        self._prompt = read.prompt

    async def ids(self, server: LlamaServer, media_marker: str) -> list[int]:
        """Return the prompt's ids. `media_marker` stands in a template for an image or a sound.

        Raises RunsWhole, EngineRefused with the engine's own words, and UpstreamError.
        """
        if self._path == COMPLETIONS:
            return await self._text_ids(server)
        if self._path != CHAT:
            raise RunsWhole(f"{self._path.decode('latin-1')} is not a generation")
        prompt = await server.apply_template(self._body)
        if any(marker in prompt for marker in (media_marker, _USUAL_MARKER) if marker):
            raise RunsWhole("a slot file holds no images and no sound")
        return await server.tokenize(prompt)

    async def _text_ids(self, server: LlamaServer) -> list[int]:
        try:
            prompt = msgspec.json.decode(self._prompt, type=str | list[int | str])
        except msgspec.DecodeError:
            raise RunsWhole("a prompt of this form is not handed over") from None
        match prompt:
            case str(text) | [str(text)]:
                return await server.tokenize(text)
            case _:
                ids = [each for each in prompt if isinstance(each, int)]
        if len(ids) != len(prompt):
            raise RunsWhole("a prompt of texts and ids is not handed over")
        return ids


def _count(raw: msgspec.Raw) -> int:
    """Read a number of answers; what is none is the engine's to refuse."""
    try:
        return msgspec.json.decode(raw, type=int)
    except msgspec.DecodeError:
        return 1
