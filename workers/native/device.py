"""Whether torch can use a device of this machine."""

from __future__ import annotations

import torch


def why_missing(device: str) -> str:
    """Say why `device` (cpu, cuda or cuda:N) cannot be used, with the mend; "" when it can."""
    if device == "cpu":
        return ""
    index = int(device.partition(":")[2] or 0)
    if torch.cuda.is_available() and index < torch.cuda.device_count():
        return ""
    return f"device {device}: torch {torch.__version__} finds no such GPU; use --device cpu"
