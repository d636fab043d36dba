"""Logits of the two real models against transformers on the same weights, float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.native.model_store import ModelFolder
from workers.native.models.decoder import Decoder
from workers.native.models.loading import load_decoder
from workers.native.models.tokenizer import Tokenizer

CITIES = (
    "Lisbon lies where the river Tagus meets the sea. Oslo has a fjord, Vienna the Danube, and "
    "Nairobi stands at 1,795 metres. Kyoto was a capital for over a thousand years; Quito, the "
    "highest today, looks up at a volcano. Trains run from Cairo to Aswan in some 13 hours. "
)
LONG = "".join(f"{number}. {CITIES}" for number in range(1, 9))  # longer than Gemma's window
PROMPTS = (
    "Hello",
    "The capital of France is",
    "def add(a, b):\n    return a + b\n",
    "na\u00efve \u65e5\u672c\u8a9e \U0001f600 12345",
    LONG,
)


@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_logits_equal_transformers(
    name: str,
    real_model: Callable[[str], ModelFolder],
    reference: Callable[[Path], Any],
    logits_of: Callable[[Decoder, Tensor, int], Tensor],
) -> None:
    folder = real_model(name).path
    decoder, tokenizer, model = load_decoder(folder), Tokenizer.from_folder(folder), None
    model = reference(folder)
    for prompt in PROMPTS:
        ids = torch.tensor(tokenizer.encode(prompt))
        with torch.no_grad():
            expected = model(ids[None]).logits[0]
        whole = logits_of(decoder, ids, len(ids))
        assert (whole - expected).abs().max() < 1e-3
        assert (logits_of(decoder, ids, 200) - whole).abs().max() < 1e-3
        assert torch.equal(whole.argmax(-1), expected.argmax(-1))
    assert len(ids) > 540
