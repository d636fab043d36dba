"""A prompt with filler behind it: how vLLM prefills for a decode worker that is another engine.

ExampleConnector stores whole blocks only, and decode is to find all of a prompt but its last token.
So the prefill worker is sent the prompt's ids and filler. Attention is causal: what follows a
prompt changes nothing in its KV, and who converts the files takes the prompt's part alone.

The filler begins with the prompt's last id: in the first layer the V of both must be the same, by
which a converter sees that it reads the files right. Then come ids of this hand-off alone: nobody
else finds these files, so they can be deleted once they are read. A whole block is stored behind
the two like ids: where vLLM prefills in several steps it stores after the first, and the last block
stored may be computed in part only. And there are two ids more than are stored: vLLM looks for
stored files under the key of one id less, and with one more than the blocks the key it looks under
and the one it would load are not the same, of which the engine dies.

Source: vllm/distributed/kv_transfer/kv_connector/v1/example_connector.py of vLLM 0.32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from router.backends.body import HANDOVER_FIELDS, MEDIA, fields_of, with_fields, without

_MARK_TOKENS = 16
_KEPT = ("model", "cache_salt", "priority")


class Tokens(msgspec.Struct):
    """The answer of `/tokenize`."""

    tokens: list[int]


def with_filler(ids: Sequence[int], block_tokens: int, context_tokens: int, mark: str) -> list[int]:
    """Return `ids` and filler. `mark` makes it unlike that of other hand-offs.

    Its ids are below 256, which every vocabulary has. Raises ValueError with the reason when it
    cannot be. `context_tokens` and `block_tokens` are 0 where the engine does not tell.
    """
    if len(ids) < 2:
        raise ValueError(f"a prompt of {len(ids)} tokens leaves nothing to hand over")
    if block_tokens < 2:
        raise ValueError(f"blocks of {block_tokens} tokens, as its metrics tell, cannot be filled")
    twice = [*ids, ids[-1]]
    marked = twice + list(hashlib.blake2b(mark.encode(), digest_size=_MARK_TOKENS).digest())
    needed = max(len(twice) + block_tokens, len(marked))
    stored = -(-needed // block_tokens) * block_tokens
    if context_tokens and stored + 2 >= context_tokens:
        raise ValueError(
            f"{len(ids)} tokens and filler, {stored + 2}, do not fit into {context_tokens}"
        )
    return marked + [0] * (stored + 2 - len(marked))


def require_plain(body: bytes) -> None:
    """Raise ValueError for a prompt whose ids do not tell all of its KV."""
    fields = fields_of(body)
    if MEDIA.search(bytes(fields.get("messages", b""))):
        raise ValueError("images and audio are not in a prompt's token ids")
    if bytes(fields.get("prompt_embeds", b"null")) != b"null":
        raise ValueError("prompt_embeds have no token ids")


def given_ids(body: bytes) -> list[int] | None:
    """Return the ids that a body has for its prompt; None where it has text or messages."""
    prompt = bytes(fields_of(body).get("prompt", b"null"))
    try:
        return msgspec.json.decode(prompt, type=list[int] | None)
    except msgspec.ValidationError:
        return None


def tokenize_body(body: bytes) -> bytes:
    """Return a body for `/tokenize`, which reads the same fields, but no text in a list."""
    prompt = bytes(fields_of(body).get("prompt", b"null"))
    try:
        (text,) = msgspec.json.decode(prompt, type=tuple[str])
    except msgspec.ValidationError:
        return without(body)
    return with_fields(body, {"prompt": text}, HANDOVER_FIELDS)


def ids_body(body: bytes, ids: Sequence[int]) -> bytes:
    """Return a body for `/v1/completions` that has `ids` for its prompt."""
    fields = fields_of(body)
    kept = {name: fields[name] for name in _KEPT if name in fields}
    return msgspec.json.encode({**kept, "prompt": ids})
