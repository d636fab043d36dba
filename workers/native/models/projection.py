"""Matrix products with stored weights, which take nearly all the time of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from workers.native.models.cpu_kernel import PANEL_COLUMNS, CpuKernel


class Projection(Protocol):
    """y = x W (+ b) for stored W [in, out]."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight matrix."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows [T, in] to a new tensor [T, out]."""

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Add the product of `rows` [T, in] to `residual` [T, out] in place and return it."""

    def columns(self, indices: Tensor) -> Tensor:
        """Columns `indices` (int64 [T]) of W as rows: a new contiguous tensor [T, in]."""


class PlainProjection:
    """W as one contiguous [in, out] matrix: for any device and dtype, through torch's BLAS.

    BLAS reads an [in, out] matrix faster than an [out, in] one when there is one row.
    """

    def __init__(self, parts: Sequence[Tensor], bias: Tensor | None = None) -> None:
        """`parts` are [out_i, in] matrices of one dtype and device, put side by side."""
        self._weight = torch.cat([part.t() for part in parts], dim=1).contiguous()
        self._bias = bias

    @property
    def weight_bytes(self) -> int:
        """See Projection."""
        return self._weight.numel() * self._weight.element_size()

    def __call__(self, rows: Tensor) -> Tensor:
        """See Projection."""
        if self._bias is None:
            return torch.mm(rows, self._weight)
        return torch.addmm(self._bias, rows, self._weight)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """See Projection."""
        residual.addmm_(rows, self._weight)
        return residual if self._bias is None else residual.add_(self._bias)

    def columns(self, indices: Tensor) -> Tensor:
        """See Projection."""
        return self._weight.index_select(1, indices).t().contiguous()


class PanelProjection:
    """W as panels of 64 columns, float32 on the CPU, through our own kernel.

    Reads weights at the memory's rate for up to six rows, computes at BLAS's rate for many, and
    gives each row the same bits whatever else is in the batch.
    """

    def __init__(
        self, kernel: CpuKernel, parts: Sequence[Tensor], bias: Tensor | None = None
    ) -> None:
        """`parts` are [out_i, in] matrices, put side by side; each out_i is a multiple of 64."""
        self._kernel = kernel
        panels = [part.view(-1, PANEL_COLUMNS, part.shape[1]).transpose(1, 2) for part in parts]
        self._panels = torch.cat(panels).contiguous()
        self._out = self._panels.shape[0] * PANEL_COLUMNS
        self._bias = bias

    @staticmethod
    def fits(parts: Sequence[Tensor]) -> bool:
        """Whether the parts can be cut into panels."""
        return all(part.shape[0] % PANEL_COLUMNS == 0 for part in parts)

    @property
    def weight_bytes(self) -> int:
        """See Projection."""
        return self._panels.numel() * self._panels.element_size()

    def __call__(self, rows: Tensor) -> Tensor:
        """See Projection."""
        out = torch.empty((rows.shape[0], self._out))
        self._kernel.multiply(rows, self._panels, out, accumulate=False)
        return out if self._bias is None else out.add_(self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> Tensor:
        """See Projection."""
        self._kernel.multiply(rows, self._panels, residual, accumulate=True)
        return residual if self._bias is None else residual.add_(self._bias)

    def columns(self, indices: Tensor) -> Tensor:
        """See Projection."""
        panel = torch.div(indices, PANEL_COLUMNS, rounding_mode="floor")
        return self._panels[panel, :, indices % PANEL_COLUMNS]
