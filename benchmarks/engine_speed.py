"""The native engine's speed against this machine's limits: `splitserve bench engine`.

Decode: one stream through the whole engine (scheduler, paged KV, sampling) against the floor that
the memory sets, weight bytes read per token / read bandwidth. Prefill: matrix arithmetic done per
second against the best rate of a plain matrix product. Limits and engine are measured in turns
with the same threads, and the result is the median over the turns: on a shared machine the memory
is faster at one moment than at another.
"""

from __future__ import annotations

import itertools
import queue
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.engines import llama_cpp
from benchmarks.errors import LoadFailed
from benchmarks.machine_limits import measure_gemm_rate, measure_read_bandwidth, torch_threads
from benchmarks.result import envelope

if TYPE_CHECKING:
    from workers.native.engine.engine import Engine
    from workers.native.engine.sequence import Output
    from workers.native.models.config import ModelConfig
    from workers.native.models.decoder import Decoder

SCHEMA = "splitserve.bench.engine/1"
_DECODE_ROUNDS = 9
_PREFILL_ROUNDS = 3
_READ_WINDOW_S = 0.15
_PREFILL_TOKENS = (512, 1024, 2048)
_DECODE_PROMPT_TOKENS = 128
_DECODE_TOKENS = 32
_WAIT_S = 120.0


def run(
    model: str = "smollm2-135m",
    *,
    threads: Sequence[int] = (),
    with_llama_cpp: bool = True,
) -> dict[str, Any]:
    """Measure and return one JSON document; `threads` defaults to half of this machine's cores,
    which is what a worker gets beside one other, and all of them.

    `decode` and `prefill` at the top are those of the smallest thread count, `by_threads` has all.
    """
    import torch

    from workers.native.model_store import ModelStore
    from workers.native.models.loading import load_decoder

    cores = torch.get_num_threads()
    counts = sorted(set(threads) or {max(1, cores // 2), cores})
    store = ModelStore()
    folder = store.resolve(model)
    decoder = load_decoder(folder.path)
    result = envelope(SCHEMA, model, seed=0)
    by_threads = {str(count): measure(decoder, count) for count in counts}
    result |= by_threads[str(counts[0])]
    result["llama_cpp"] = None
    gguf = store.gguf(model) if with_llama_cpp else None
    if gguf is not None:
        result["llama_cpp"] = _llama_cpp(gguf, counts[-1])
    result["threads"] = counts[0]
    result["by_threads"] = by_threads
    return result


def measure(decoder: Decoder, threads: int) -> dict[str, Any]:
    """`{decode: {...}, prefill: {...}}` of one engine with `threads` threads."""
    with torch_threads(threads):
        stream = _Stream(decoder)
        try:
            decodes = [_decode(stream, decoder, threads) for _ in range(_DECODE_ROUNDS)]
            prefills = [_prefill(stream, decoder, threads) for _ in range(_PREFILL_ROUNDS)]
        finally:
            stream.close()
    figures = _medians(decodes) | _medians(prefills)
    return {
        "decode": {
            "tok_s": figures["decode_tok_s"],
            "floor_tok_s": figures["floor_tok_s"],
            "ratio": figures["decode_ratio"],
            "read_gb_s": figures["read_gb_s"],
            "weight_bytes_per_token": decoder.weight_bytes_per_token,
        },
        "prefill": {
            "tok_s": figures["prefill_tok_s"],
            "gemm_ratio": figures["gemm_ratio"],
            "gemm_gflop_s": figures["gemm_gflop_s"],
            "by_tokens": {
                str(count): {
                    "tok_s": figures[f"prefill_{count}_tok_s"],
                    "gemm_ratio": figures[f"gemm_{count}_ratio"],
                }
                for count in _PREFILL_TOKENS
            },
        },
    }


def _medians(turns: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def _decode(stream: _Stream, decoder: Decoder, threads: int) -> dict[str, float]:
    before = measure_read_bandwidth(threads, window_s=_READ_WINDOW_S)
    decode_tok_s = stream.decode_tok_s()
    after = measure_read_bandwidth(threads, window_s=_READ_WINDOW_S)
    floor_tok_s = (before + after) / 2 / decoder.weight_bytes_per_token
    return {
        "decode_tok_s": decode_tok_s,
        "floor_tok_s": floor_tok_s,
        "decode_ratio": decode_tok_s / floor_tok_s,
        "read_gb_s": (before + after) / 2e9,
    }


def _prefill(stream: _Stream, decoder: Decoder, threads: int) -> dict[str, float]:
    before = measure_gemm_rate(decoder.dtype, threads)
    seconds = {count: stream.prefill_s(count) for count in _PREFILL_TOKENS}
    gemm = (before + measure_gemm_rate(decoder.dtype, threads)) / 2
    flop = {count: prefill_flop(decoder.config, count) for count in _PREFILL_TOKENS}
    turn = {
        "gemm_gflop_s": gemm / 1e9,
        "prefill_tok_s": sum(seconds) / sum(seconds.values()),
        "gemm_ratio": sum(flop.values()) / sum(seconds.values()) / gemm,
    }
    for count, spent_s in seconds.items():
        turn[f"prefill_{count}_tok_s"] = count / spent_s
        turn[f"gemm_{count}_ratio"] = flop[count] / spent_s / gemm
    return turn


def prefill_flop(config: ModelConfig, tokens: int) -> float:
    """Operations of the matrix products in a prompt's prefill: two per multiply-add.

    All layers for every token, the output head once, and of attention only the part under the
    causal mask and inside the sliding windows.
    """
    weights = config.layers * config.layer_parameters * tokens + config.hidden * config.vocab_size
    pairs = 0
    for window in config.windows:
        reach = min(window or tokens, tokens)
        pairs += reach * (reach + 1) // 2 + (tokens - reach) * reach
    return 2.0 * weights + 4.0 * pairs * config.heads * config.head_dim


class _Stream:
    """One request after another through an engine of its own."""

    def __init__(self, decoder: Decoder) -> None:
        self._random = random.Random(0)
        self._vocab_size = decoder.config.vocab_size
        self._numbers = itertools.count()
        self._engine = _engine(decoder)
        self._engine.start()

    def close(self) -> None:
        self._engine.stop()
        self._engine.pool.close()

    def decode_tok_s(self) -> float:
        """Tokens per second of one answer, the first token and the prompt left out."""
        times_s = self._answer(_DECODE_PROMPT_TOKENS, _DECODE_TOKENS)[1:]
        return (len(times_s) - 1) / (times_s[-1] - times_s[0])

    def prefill_s(self, tokens: int) -> float:
        """Seconds from asking to the first token of a prompt of `tokens` tokens."""
        begun_s, first_s = self._answer(tokens, 1)
        return first_s - begun_s

    def _answer(self, prompt_tokens: int, max_tokens: int) -> list[float]:
        """When a random prompt was sent, and when each token of its answer came."""
        from workers.native.engine.engine import Generation
        from workers.native.engine.sequence import Failed, Token
        from workers.native.sampling.params import SamplingParams

        prompt = [self._random.randrange(100, self._vocab_size) for _ in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
        outputs: queue.SimpleQueue[tuple[float, Output]] = queue.SimpleQueue()
        wish = Generation(
            f"speed-{next(self._numbers)}",
            prompt,
            params,
            lambda output: outputs.put((time.perf_counter(), output)),
        )
        times_s = [time.perf_counter()]
        self._engine.generate(wish)
        while len(times_s) <= max_tokens:
            at_s, output = outputs.get(timeout=_WAIT_S)
            if isinstance(output, Failed):
                raise LoadFailed(f"the engine failed: {output.error}") from output.error
            if isinstance(output, Token):
                times_s.append(at_s)
        return times_s


class _NoText:
    """Speed is counted in tokens; their text is the detokenizer's own matter."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _engine(decoder: Decoder) -> Engine:
    from workers.native.engine.engine import Engine
    from workers.native.engine.settings import EngineSettings
    from workers.native.kv.layout import KvLayout
    from workers.native.kv.pool import KvPool

    config = decoder.config
    layout = KvLayout(config.layers, config.kv_heads, config.head_dim, decoder.dtype)
    blocks = layout.blocks_for(2 * max(_PREFILL_TOKENS))
    pool = KvPool(layout, blocks, decoder.device, decoder.cpu_kernel)
    return Engine(
        decoder,
        pool,
        EngineSettings(),
        eos=frozenset(),
        model_hash="speed",
        vocab_size=config.vocab_size,
        make_detokenizer=_NoText,
    )


def _llama_cpp(gguf: Path, threads: int) -> dict[str, Any] | None:
    server = llama_cpp.find_server()
    if server is None:
        return None
    prompts = {"decode": _DECODE_PROMPT_TOKENS, "prefill": _PREFILL_TOKENS[1]}
    return llama_cpp.measure(server, gguf, threads, prompts, answer_tokens=_DECODE_TOKENS)
