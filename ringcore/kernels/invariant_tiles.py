"""The tile of a product on a GPU whose rows do not depend on how many there are: one for every number of rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from ringcore.kernels.packed_weight import PackedWeight
from ringcore.kernels.skinny_configs import many_packed
from ringcore.kernels.skinny_tiles import DotConfig
from ringcore.kernels.skinny_times import NUM_SMS

__all__ = ["invariant_tile"]

_ROWS = 64
_DENSE = DotConfig(128, 64, 8, 4, 1, prefetched_inputs=0)
_FLOAT32 = DotConfig(32, 32, 4, 2, 1, prefetched_inputs=0)  # without tensor cores


def invariant_tile(weight: torch.Tensor | PackedWeight) -> DotConfig:
    """Chosen by the weight alone: without splits, and with as many rows whatever the number of rows is, since another
    tile may be another instruction of the tensor cores."""
    if isinstance(weight, PackedWeight):
        tile = many_packed(weight.numbers)
        if weight.dtype == torch.float32:  # x takes twice the shared memory
            tile = replace(tile, block_weights=64, block_inputs=64, num_warps=4, num_stages=2)
        return replace(tile, block_rows=_ROWS, least_rows=_ROWS)
    if weight.dtype == torch.float32:
        return replace(_FLOAT32, block_rows=_ROWS // 2, least_rows=_ROWS // 2)
    # Few outputs: a smaller tile, so that most multiprocessors have one.
    block_weights, num_warps = (128, 8) if len(weight) >= 128 * NUM_SMS else (64, 4)
    return replace(_DENSE, block_weights=block_weights, num_warps=num_warps, block_rows=_ROWS, least_rows=_ROWS)
