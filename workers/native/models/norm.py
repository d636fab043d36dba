"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor, float32
from torch.nn import functional as F

from workers.native.models.cpu_kernel import CpuKernel

_LANES = 16


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    def __init__(self, weight: Tensor, eps: float, kernel: CpuKernel | None = None) -> None:
        """`weight` is float32 [last dimension], with Gemma's +1 already added.

        With a kernel the norm takes a quarter of the time that torch's five operations take on
        one row; it is for float32 on the CPU.
        """
        self._weight = weight
        self._eps = eps
        self._shape = (weight.shape[0],)
        self._kernel = kernel if weight.shape[0] % _LANES == 0 else None

    def __call__(self, values: Tensor) -> Tensor:
        """Values [T, width] or [T, heads, width] to a new tensor of the same shape and dtype."""
        if self._kernel is not None:
            return self._kernel.rms_norm(values, self._weight, self._eps)
        if values.dtype == float32:
            return F.rms_norm(values, self._shape, self._weight, self._eps)
        normed = F.rms_norm(values.float(), self._shape, self._weight, self._eps)
        return normed.to(values.dtype)
