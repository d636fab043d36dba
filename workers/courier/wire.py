"""The courier's messages. Sizes are bytes, times are seconds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(max_length=200)]
Bytes = Annotated[int, Field(gt=0)]
Tokens = Annotated[int, Field(gt=0, le=1 << 24)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Checksum = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Ticket = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class Message(BaseModel):
    """A message: frozen, and unknown fields are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SealWish(Message):
    """A file that the engine has saved: check it, and let another courier have it."""

    name: Name
    size_bytes: Bytes
    tokens: Tokens
    digest: Digest


class SourceFields(Message):
    """Where a sealed file is."""

    url: Annotated[str, Field(max_length=2000)]
    folder: Annotated[str, Field(max_length=200)]
    ticket: Ticket


class PullWish(SealWish):
    """A sealed file of another courier: bring it here."""

    checksum: Checksum
    source: SourceFields


class ConvertWish(Message):
    """KV that vLLM's ExampleConnector has left in the shared folder: make a slot file of it.

    `kv_type` is the type of the decode worker's cache.
    """

    name: Name
    folder: Annotated[str, Field(max_length=4000)]
    token_ids: Annotated[list[TokenId], Field(min_length=2, max_length=1 << 24)]
    block_tokens: Annotated[int, Field(gt=0, le=1 << 20)]
    prompt_tokens: Annotated[int, Field(gt=1)] | None = None
    kv_type: Literal["f32", "f16", "bf16"] = "f16"
