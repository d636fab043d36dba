"""Other engines' KV, asked for over HTTP: which folder it may lie in, for which model."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workers.courier.errors import CannotConvert
from workers.courier.slot_head import tokens_digest
from workers.courier.store import Promise, Store
from workers.courier.wire import ConvertWish

if TYPE_CHECKING:
    from workers.courier.convert import ModelLayout


@dataclass(frozen=True, slots=True)
class Made:
    """A slot file was written here: its size and for how many of the prompt's tokens."""

    size_bytes: int
    tokens: int


class Converter:
    """Converts what lies in `examples`, for the model of `gguf`; without both it converts nothing.

    Needs numpy and gguf, which the extra `native` installs.
    """

    def __init__(self, store: Store, examples: Path | None, gguf: Path | None) -> None:
        self._store = store
        self._examples = None if examples is None else examples.resolve()
        self._gguf = gguf
        self._layouts: dict[str, ModelLayout] = {}
        self._reading = threading.Lock()

    @property
    def ready(self) -> bool:
        """True when it was told where other engines' KV lies."""
        return self._examples is not None and self._gguf is not None

    def prepare(self) -> None:
        """Read the model's shape, which takes seconds. Raises CannotConvert for other models."""
        if not self.ready:
            return
        try:
            self._layout("f16")
        except ImportError as error:
            raise CannotConvert(
                f"--examples needs numpy and gguf ({error}); pip install 'splitserve[native]'"
            ) from error

    async def convert(self, wish: ConvertWish) -> Made:
        """Write the file that is asked for. Raises CourierError, OSError."""
        folder = self._check_folder(wish.folder)
        return await asyncio.to_thread(self._convert, wish, folder)

    def _check_folder(self, named: str) -> Path:
        if self._examples is None:
            raise CannotConvert(
                "this courier was not told where vLLM's KV lies; start it with --examples DIR"
            )
        folder = Path(named).resolve()
        if not folder.is_relative_to(self._examples):
            raise CannotConvert(
                f"folder {named[:200]!r} is not within this courier's --examples; "
                "name the worker's shared_storage_path in both places"
            )
        return folder

    def _convert(self, wish: ConvertWish, folder: Path) -> Made:
        from workers.courier.convert import convert  # noqa: PLC0415 - numpy is an extra

        model = self._layout(wish.kv_type)
        # Its size is known only once it is written; no token of it is larger than the model's.
        room_bytes = _most_bytes(model, len(wish.token_ids))
        with self._store.room(wish.name, room_bytes) as part:
            made = convert(
                folder,
                wish.token_ids,
                part,
                model,
                wish.block_tokens,
                prompt_tokens=wish.prompt_tokens,
            )
            kept = wish.token_ids[: made.tokens]
            promise = Promise(wish.name, made.size_bytes, made.tokens, tokens_digest(kept))
            self._store.check(promise, part)
            self._store.keep(part, wish.name)
        return Made(made.size_bytes, made.tokens)

    def _layout(self, kv_type: str) -> ModelLayout:
        from workers.courier.convert import layout_of_gguf  # noqa: PLC0415
        from workers.courier.slot_file import KvType  # noqa: PLC0415

        assert self._gguf is not None
        with self._reading:
            if kv_type not in self._layouts:
                self._layouts[kv_type] = layout_of_gguf(self._gguf, KvType[kv_type.upper()])
            return self._layouts[kv_type]


def _most_bytes(model: ModelLayout, tokens: int) -> int:
    from workers.courier.slot_file import size_bytes  # noqa: PLC0415

    return size_bytes(tokens, model.row_values, model.kv_type)
