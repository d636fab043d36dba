"""Choose one token from one row of logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from workers.native.sampling.params import SamplingParams
from workers.native.sampling.philox import gumbel_noise


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and its natural log-probability under the model, before any sampling setting."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token, and where asked its log-probability and those of its best rivals."""

    token_id: int
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()


def sample(
    logits: Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    sequence: int = 0,
    banned: Sequence[int] = (),
) -> Sampled:
    """Choose the next token from `logits` [vocab], float32.

    `sequence` is the choice index of the request (0 for n = 1); the position is that of the new
    token, so the same request gives the same noise wherever it runs. `banned` ids are not chosen
    (end-of-text under `min_tokens`).
    """
    row = logits
    if params.adjusts_logits:
        row = _penalised(row, params, prompt, output)
    if banned:
        row = row.clone()
        row[list(banned)] = float("-inf")
    if params.greedy:
        token_id = int(row.argmax())
    else:
        token_id = _draw(row, params, sequence, len(prompt) + len(output))
    if params.logprobs is None:
        return Sampled(token_id)
    chosen, top = rank_logprobs(logits, token_id, params.logprobs)
    return Sampled(token_id, chosen, top)


def rank_logprobs(
    logits: Tensor, token_id: int, count: int
) -> tuple[TokenLogprob, tuple[TokenLogprob, ...]]:
    """Return the log-probability of `token_id` and the `count` highest of the row."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = TokenLogprob(token_id, float(logprobs[token_id]))
    if not count:
        return chosen, ()
    values, ids = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(ids.tolist(), values.tolist(), strict=True)
    return chosen, tuple(TokenLogprob(int(i), float(v)) for i, v in pairs)


def _penalised(
    row: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> Tensor:
    row = row.clone()
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*prompt, *output}), device=row.device)
        picked = row[seen]
        factor = params.repetition_penalty
        row[seen] = torch.where(picked > 0, picked / factor, picked * factor)
    if output and (params.presence_penalty or params.frequency_penalty):
        counts = Counter(output)
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
        row[ids] -= params.presence_penalty + params.frequency_penalty * times
    for token_id, bias in params.logit_bias.items():
        row[token_id] += bias
    return row


def _draw(row: Tensor, params: SamplingParams, sequence: int, position: int) -> int:
    """Gumbel-max over the tokens that survive top-k, top-p and min-p."""
    scaled = row.double() / params.temperature
    ids, logits = _survivors(scaled, params)
    noise = gumbel_noise(ids, params.seed, sequence, position)
    return int(ids[int(np.argmax(logits + noise))])


def _survivors(
    scaled: Tensor, params: SamplingParams
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.float64]]
]:
    narrow = params.top_k > 0 or params.top_p < 1.0
    if narrow:
        count = min(params.top_k or len(scaled), len(scaled))
        values, ids = scaled.topk(count) if count < len(scaled) else scaled.sort(descending=True)
        if params.top_p < 1.0:
            shares = torch.softmax(values, dim=-1)
            before = shares.cumsum(-1) - shares
            keep = max(1, int((before < params.top_p).sum()))
            values, ids = values[:keep], ids[:keep]
    else:
        values, ids = scaled, torch.arange(len(scaled), device=scaled.device)
    if params.min_p > 0.0:
        kept = values >= values.max() + float(np.log(params.min_p))
        values, ids = values[kept], ids[kept]
    finite = torch.isfinite(values)
    return ids[finite].cpu().numpy(), values[finite].cpu().numpy()
