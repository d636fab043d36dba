"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor, float32
from torch.nn import functional as F


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension by its root mean square, computed in float32.

    `weight` is float32 [last dimension], with Gemma's +1 already added. Keeps `hidden`'s dtype.
    """
    shape = (hidden.shape[-1],)
    if hidden.dtype == float32:
        return F.rms_norm(hidden, shape, weight, eps)
    return F.rms_norm(hidden.float(), shape, weight, eps).to(hidden.dtype)
