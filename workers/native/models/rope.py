"""Rotary position embeddings: frequencies, the table of cosines and sines, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.native.models.config import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> Tensor:
    """Float32 [head_dim / 2] angular frequencies per position.

    Follows transformers' `modeling_rope_utils` operation by operation, so that float32 results
    agree with it to the last bit.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.int64).to(dtype=torch.float32)
    frequencies = 1.0 / (spec.theta ** (steps / head_dim))
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _llama3_frequencies(spec, frequencies)
    return frequencies


def _llama3_frequencies(spec: RopeSpec, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, smooth in between."""
    context = spec.original_context_tokens
    low_wavelength = context / spec.low_freq_factor
    high_wavelength = context / spec.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > low_wavelength, frequencies / spec.factor, frequencies)
    smooth = (context / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    smoothed = (1 - smooth) * scaled / spec.factor + smooth * scaled
    medium = ~(wavelengths < high_wavelength) & ~(wavelengths > low_wavelength)
    return torch.where(medium, smoothed, scaled)


class RopeTable:
    """Cosines and signed sines of every position, ready to be gathered by position.

    The sine's first half carries the minus sign of the rotation, so that rotating is
    `x * cos + swap_halves(x) * sin`: one multiply, one roll, one fused multiply-add.
    """

    def __init__(
        self, spec: RopeSpec, head_dim: int, tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies = inverse_frequencies(spec, head_dim)
        positions = torch.arange(tokens, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), dim=-1).to(device=device, dtype=dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device=device, dtype=dtype)

    def gather(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions int64 [T] to (cos, signed sin), each [T, 1, head_dim]."""
        return (
            self._cos.index_select(0, positions).unsqueeze(1),
            self._sin.index_select(0, positions).unsqueeze(1),
        )


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim] by the gathered (cos, signed sin); returns a new tensor."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return torch.addcmul(heads * cos, swapped, sin)
