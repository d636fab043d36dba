"""Seeded chat requests of a given size, no two alike."""

import json
import random
from collections.abc import Iterator

CHAT_PATH = "/v1/chat/completions"
FAMILIES = 8
"""Different system prompts: a quarter of each request is shared within its family."""
SYLLABLES = tuple(c + v for c in "bcdfghklmnprstvz" for v in "aeiou")


def _words(rng: random.Random, size_bytes: int) -> str:
    """Lower-case pseudo words of six letters, cut to the size."""
    picked = rng.choices(SYLLABLES, k=3 * (size_bytes // 7 + 1))
    words = ("".join(picked[i : i + 3]) for i in range(0, len(picked), 3))
    return " ".join(words)[:size_bytes]


def chat_bodies(
    seed: int, *, model: str, prompt_bytes: int, max_tokens: int, stream: bool
) -> Iterator[bytes]:
    """JSON bodies without end; the prompts of one seed are the same in every run."""
    rng = random.Random(seed)
    systems = [_words(rng, prompt_bytes // 4) for _ in range(FAMILIES)]
    while True:
        messages = [
            {"role": "system", "content": rng.choice(systems)},
            {"role": "user", "content": _words(rng, prompt_bytes - prompt_bytes // 4)},
        ]
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream}
        yield json.dumps(body).encode()
