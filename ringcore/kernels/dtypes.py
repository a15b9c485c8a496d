"""The floating-point types of models and KV caches, by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["TORCH_DTYPES"]

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
