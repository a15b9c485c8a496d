"""What the Triton attention kernels do not serve."""

from __future__ import annotations

import importlib.util

import torch

from ringcore.kv_cache.spec import DTYPE_BYTES, HeadsSpec, KVCacheSpec, MLASpec

__all__ = ["refusal_of"]

_MAX_HEAD_SIZE = 256
_FP8_SINCE = (8, 9)  # compute capability


def refusal_of(spec: KVCacheSpec, device: torch.device) -> str | None:
    """Why they do not serve layers of `spec` on `device`; None if they do."""
    if isinstance(spec, MLASpec):
        return "it attends over keys and values of heads, not over latents"
    if device.type != "cuda":
        return f"it runs on a CUDA device, not on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if spec.dtype not in DTYPE_BYTES:
        return f"it has no dtype {spec.dtype}"
    for size in (spec.head_size, spec.value_size):
        if size % 8 or not 16 <= size <= _MAX_HEAD_SIZE:
            return f"its heads have a multiple of 8 from 16 to {_MAX_HEAD_SIZE} numbers, not {size}"
    if spec.block_size % 16:
        return f"its blocks have a multiple of 16 tokens, not {spec.block_size}"
    return _fp8_refusal(spec, device) if spec.is_fp8 else None


def _fp8_refusal(spec: HeadsSpec, device: torch.device) -> str | None:
    """Likewise, of FP8 layers."""
    if spec.v_head_size is not None:
        return f"in FP8 its values are as wide as its keys, {spec.head_size}, not {spec.v_head_size}"
    if spec.head_size % 16:
        return f"in FP8 its heads have a multiple of 16 numbers, not {spec.head_size}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _FP8_SINCE:
        return "in FP8 it needs a GPU of compute capability 8.9 (Ada, Hopper) or later"
    return None
