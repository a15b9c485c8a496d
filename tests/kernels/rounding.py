"""How far one rounding may be off."""

from __future__ import annotations

import torch


def rounds_to_nearest(dtype: torch.dtype, device: torch.device) -> bool:
    """Triton's interpreter cuts the bits off that bfloat16 does not have; a GPU rounds to the nearest number."""
    return device.type == "cuda" or dtype != torch.bfloat16


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """The largest relative error of one rounding to `dtype` by a kernel on `device`."""
    unit = torch.finfo(dtype).eps
    return unit / 2 if rounds_to_nearest(dtype, device) else unit
