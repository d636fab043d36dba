"""vLLM's ExampleConnector files become slot files; the engine's side is written out naively."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.backends.vllm_filler import with_filler
from workers.courier.convert import (
    ModelLayout,
    convert,
    interleaved,
    layout_of_config,
    layout_of_gguf,
)
from workers.courier.errors import CannotConvert, CourierError, KvMissing
from workers.courier.example_folder import folder_of, read_layer, stored_tokens
from workers.courier.slot_file import (
    FloatArray,
    KvType,
    bf16_to_float32,
    float32_to_bf16,
    read_slot,
)

MODEL = ModelLayout(layers=2, kv_heads=2, head_dim=4, kv_type=KvType.F32)
BLOCK = 4
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


class Prefill:
    """What a prefill worker computed for some ids, and the folder it leaves."""

    def __init__(
        self, shared: Path, sent: list[int], model: ModelLayout = MODEL, block: int = BLOCK
    ) -> None:
        self.shared, self.sent, self.block = shared, sent, block
        self.stored = stored_tokens(len(sent), block)
        self.kv = kv_of(sent[: self.stored], model)
        # As vLLM's ExampleConnector names it, from torch.tensor(ids).numpy().tobytes().
        cut = b"".join(struct.pack("<q", each) for each in sent[: self.stored])
        self.folder = shared / hashlib.md5(cut).hexdigest()

    def save(self, dtype: str = "F32") -> "Prefill":
        self.folder.mkdir()
        for number, (keys, values) in enumerate(self.kv):
            name = f"model.layers.{number}.self_attn.attn.safetensors"
            write_safetensors(self.folder / name, memory_of(keys, values, self.block), dtype)
        return self


def kv_of(ids: list[int], model: ModelLayout) -> FloatArray:
    """[layers, K and V, tokens, heads, dim], as bfloat16 holds it; random beyond layer 0.

    In layer 0 K and V depend on a token's id alone, but for the rotation of K by its place.
    """
    draw = np.random.default_rng(len(ids))
    shape = (model.kv_heads, model.head_dim)
    kv = draw.standard_normal((model.layers, 2, len(ids), *shape))
    of_id = draw.standard_normal((2, 256, *shape))
    kv[0] = of_id[:, ids]
    angles = np.arange(len(ids))[:, None, None] / 10 ** np.arange(model.head_dim // 2)
    pairs = kv[0, 0].reshape(len(ids), model.kv_heads, 2, -1)
    turned = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * np.exp(1j * angles)
    kv[0, 0] = np.concatenate((turned.real, turned.imag), axis=2)
    return bf16_to_float32(float32_to_bf16(kv.astype(np.float32)))


def memory_of(keys: FloatArray, values: FloatArray, block: int) -> FloatArray:
    """vLLM's CPU cache, number by number, gathered per token like its connector does."""
    n_tokens, heads, dim = keys.shape
    cache = np.zeros((n_tokens // block, heads, 2 * dim * block), np.float32)
    for token in range(n_tokens):
        page, at = divmod(token, block)
        for head in range(heads):
            for i in range(dim):
                cache[page, head, i * block + at] = keys[token, head, i]
                cache[page, head, dim * block + at * dim + i] = values[token, head, i]
    view = cache.reshape(n_tokens // block, heads, block, 2 * dim)
    slots = np.arange(n_tokens)
    return view[slots // block, :, slots % block]


def write_safetensors(path: Path, array: FloatArray, dtype: str) -> None:
    data = {
        "F32": array.tobytes(),
        "F16": array.astype(np.float16).tobytes(),
        "BF16": float32_to_bf16(array).tobytes(),
        "F8_E4M3": bytes(array.size),
    }[dtype]
    entry = {"dtype": dtype, "shape": array.shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"kv_cache": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def lengthened(prompt: list[int], block: int = BLOCK) -> list[int]:
    return with_filler(prompt, block, 0, "a mark")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n_prompt=st.integers(2, 40),
    block=st.sampled_from((2, 3, 4, 16)),
    model=st.builds(
        ModelLayout,
        layers=st.integers(1, 3),
        kv_heads=st.integers(1, 3),
        head_dim=st.sampled_from((2, 4, 6, 8)),
        kv_type=st.just(KvType.F32),
    ),
    dtype=st.sampled_from(("F32", "BF16")),
)
def test_every_token_but_the_last_arrives_as_llama_cpp_keeps_it(
    tmp_path_factory: pytest.TempPathFactory,
    n_prompt: int,
    block: int,
    model: ModelLayout,
    dtype: str,
) -> None:
    shared = tmp_path_factory.mktemp("shared")
    prompt = list(range(n_prompt))
    worker = Prefill(shared, lengthened(prompt, block), model, block).save(dtype)
    out = shared / "slot"
    done = convert(shared, worker.sent, out, model, block, prompt_tokens=n_prompt)
    assert (done.tokens, done.size_bytes) == (n_prompt - 1, out.stat().st_size)
    slot = read_slot(out)
    assert slot.token_ids == tuple(prompt[:-1])
    for number, (keys, values) in enumerate(worker.kv):
        kept = values[: n_prompt - 1].reshape(n_prompt - 1, -1)
        np.testing.assert_array_equal(slot.values[number], kept)
        got = slot.keys[number].reshape(n_prompt - 1, model.kv_heads, model.head_dim)
        half = model.head_dim // 2
        for i in range(half):  # dimensions i and i + half are rotated together
            np.testing.assert_array_equal(got[..., 2 * i], keys[: n_prompt - 1, :, i])
            np.testing.assert_array_equal(got[..., 2 * i + 1], keys[: n_prompt - 1, :, i + half])


def test_without_filler_whole_blocks_but_the_last_are_handed_over(tmp_path: Path) -> None:
    worker = Prefill(tmp_path, [*range(7), *range(7)]).save()
    done = convert(tmp_path, worker.sent, tmp_path / "slot", MODEL, BLOCK)
    assert done.tokens == 8
    assert read_slot(tmp_path / "slot").token_ids == (*range(7), 0)
    assert worker.folder.is_dir(), "others may look for this prompt"


def test_a_folder_of_this_hand_off_alone_is_deleted(tmp_path: Path) -> None:
    worker = Prefill(tmp_path, lengthened([1, 2, 3, 4, 5])).save()
    convert(tmp_path, worker.sent, tmp_path / "slot", MODEL, BLOCK, prompt_tokens=5)
    assert not worker.folder.exists()


def test_float16_is_read(tmp_path: Path) -> None:
    ones = np.full((4, 1, 2), 0.5, np.float32)
    write_safetensors(tmp_path / "a", memory_of(ones, ones, 2), "F16")
    keys, values = read_layer(tmp_path / "a", kv_heads=1, head_dim=2, block_tokens=2, keep_tokens=2)
    assert keys.tolist() == values.tolist() == [[[0.5, 0.5]]] * 2


def test_the_key_is_the_connectors(tmp_path: Path) -> None:
    # From torch.tensor([5, 6, 7, 8]).numpy().tobytes(), hashed by vLLM's safe_hash.
    name = hashlib.md5(bytes.fromhex("05000000000000000600000000000000")).hexdigest()
    assert folder_of(tmp_path, [5, 6, 7, 8], 2) == tmp_path / name


@pytest.mark.parametrize("n,block,stored", [(0, 4, 0), (1, 4, 0), (4, 4, 0), (5, 4, 4), (9, 4, 8)])
def test_only_whole_blocks_before_the_last_token_are_stored(
    n: int, block: int, stored: int
) -> None:
    assert stored_tokens(n, block) == stored


# --- refusals -------------------------------------------------------------------------------------


def refused(worker: Prefill, model: ModelLayout = MODEL, prompt_tokens: int = 5) -> str:
    out = worker.shared / "slot"
    with pytest.raises(CourierError) as caught:
        convert(worker.shared, worker.sent, out, model, BLOCK, prompt_tokens=prompt_tokens)
    assert not out.exists()
    assert worker.folder.is_dir() or isinstance(caught.value, KvMissing)
    return str(caught.value)


def a_worker(shared: Path) -> Prefill:
    return Prefill(shared, lengthened([1, 2, 3, 4, 5]))


def test_a_prompt_that_was_never_stored(tmp_path: Path) -> None:
    assert "no KV of this prompt" in refused(a_worker(tmp_path))


def test_a_missing_layer(tmp_path: Path) -> None:
    worker = a_worker(tmp_path).save()
    next(worker.folder.iterdir()).unlink()
    assert "holds 1 layers and the model has 2" in refused(worker)


def test_a_prompt_prefilled_in_steps(tmp_path: Path) -> None:
    # The first step stored what it had, under the key of the whole prompt.
    worker = a_worker(tmp_path).save()
    for path in worker.folder.iterdir():
        write_safetensors(path, np.zeros((8, 2, 8), np.float32), "F32")
    assert "--max-num-batched-tokens" in refused(worker)


def test_another_models_shape(tmp_path: Path) -> None:
    assert "serve the same model" in refused(
        a_worker(tmp_path).save(), ModelLayout(2, 1, 8, KvType.F16)
    )


def test_a_cache_of_eight_bits(tmp_path: Path) -> None:
    assert "F8_E4M3" in refused(a_worker(tmp_path).save("F8_E4M3"))


@pytest.mark.parametrize("prompt_tokens", [0, 1])
def test_a_prompt_too_short_to_split(tmp_path: Path, prompt_tokens: int) -> None:
    assert "serve so short a prompt whole" in refused(
        a_worker(tmp_path).save(), prompt_tokens=prompt_tokens
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: b"",
        lambda whole: whole[:7],
        lambda whole: whole[:40],
        lambda whole: whole[:-1],
        lambda whole: struct.pack("<Q", 2**40) + whole[8:],
        lambda whole: whole[:8] + b"[" + whole[9:],
        lambda whole: whole.replace(b"kv_cache", b"kv_store"),
        lambda whole: whole.replace(b'"data_offsets": [0', b'"data_offsets": [9'),
    ],
)
def test_a_damaged_file(tmp_path: Path, damage: Any) -> None:
    worker = a_worker(tmp_path).save()
    path = next(worker.folder.iterdir())
    path.write_bytes(damage(path.read_bytes()))
    assert "is no whole safetensors file" in refused(worker)


def test_a_layout_of_another_processor_or_a_gpu(tmp_path: Path) -> None:
    worker = a_worker(tmp_path)
    worker.folder.mkdir()
    for number, kv in enumerate(worker.kv):
        path = worker.folder / f"model.layers.{number}.self_attn.attn.safetensors"
        write_safetensors(path, np.concatenate(list(kv), axis=2), "F32")
    assert "lays its KV out in another way" in refused(worker)


def test_ids_that_are_all_different_prove_no_layout(tmp_path: Path) -> None:
    worker = Prefill(tmp_path, list(range(14))).save()
    with pytest.raises(CannotConvert, match="no id comes twice"):
        convert(tmp_path, worker.sent, tmp_path / "slot", MODEL, BLOCK)


# --- layouts --------------------------------------------------------------------------------------


def config_file(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    return path


def test_a_hugging_face_folder_tells_the_layout(tmp_path: Path) -> None:
    assert layout_of_config(config_file(tmp_path)) == ModelLayout(30, 3, 64, KvType.F16)
    assert layout_of_config(config_file(tmp_path, head_dim=32)).row_values == (96,) * 30
    alone = config_file(tmp_path, num_key_value_heads=None)
    assert layout_of_config(alone, KvType.F32) == ModelLayout(30, 9, 64, KvType.F32)


@pytest.mark.parametrize(
    "changes,named",
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "architecture Qwen2ForCausalLM"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architecture DeepseekV3ForCausalLM"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4096}, "a sliding window"),
        ({"architectures": None}, "describes no model"),
    ],
)
def test_other_models_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CannotConvert, match=named):
        layout_of_config(config_file(tmp_path, **changes))


def gguf_file(folder: Path, architecture: str = "llama", **lengths: int) -> Path:
    path = folder / "model.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(30)
    writer.add_embedding_length(576)
    writer.add_head_count(9)
    writer.add_head_count_kv(3)
    for name, length in lengths.items():
        writer.add_uint32(f"{architecture}.{name.replace('__', '.')}", length)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_tells_the_layout(tmp_path: Path) -> None:
    assert layout_of_gguf(gguf_file(tmp_path)) == ModelLayout(30, 3, 64, KvType.F16)
    wider = gguf_file(tmp_path, attention__key_length=128, attention__value_length=128)
    assert layout_of_gguf(wider).head_dim == 128


@pytest.mark.parametrize(
    "architecture,lengths,named",
    [
        ("qwen2", {}, "architecture qwen2"),
        ("gemma3", {}, "architecture gemma3"),
        ("llama", {"attention__value_length": 32}, "K and V of different width"),
        ("llama", {"rope__dimension_count": 32}, "rotary embedding of a part"),
    ],
)
def test_other_gguf_files_are_refused_by_name(
    tmp_path: Path, architecture: str, lengths: dict[str, int], named: str
) -> None:
    with pytest.raises(CannotConvert, match=named):
        layout_of_gguf(gguf_file(tmp_path, architecture, **lengths))


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"hello" * 100)
    with pytest.raises(CannotConvert, match="is no GGUF file"):
        layout_of_gguf(path)


def test_the_order_inside_a_head() -> None:
    keys = np.arange(6, dtype=np.float32).reshape(1, 1, 6)
    assert interleaved(keys).ravel().tolist() == [0, 3, 1, 4, 2, 5]
