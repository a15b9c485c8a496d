"""The dtypes of models, KV caches and checkpoints, by their names in torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["TORCH_DTYPES"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    )
}
