"""Reads memory and keeps a sum: the fastest way through it, as a ceiling for whatever must read as much."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["read_all", "sums_for"]

_BLOCK = 4096
_PROGRAMS_AN_SM = 64


@triton.jit
def _read_kernel(source: tl.tensor, sums: tl.tensor, num_blocks: int, block: tl.constexpr) -> None:
    first = tl.program_id(0).to(tl.int64) * num_blocks
    columns = tl.arange(0, block)
    total = tl.zeros([block], tl.int32)
    for i in range(num_blocks):
        total += tl.load(source + (first + i) * block + columns)
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def read_all(source: torch.Tensor, sums: torch.Tensor) -> int:
    """Sums the int32 of `source` [n] by equal runs into `sums` [num_programs], one run a program; the bytes it read:
    all but what is left over when n is divided into runs of whole blocks.
    """
    (num_programs,) = sums.shape
    num_blocks = source.numel() // (num_programs * _BLOCK)
    _read_kernel[(num_programs,)](source, sums, num_blocks, _BLOCK, num_warps=8)
    return num_blocks * num_programs * _BLOCK * source.element_size()


def sums_for(device: torch.device) -> torch.Tensor:
    """The `sums` of `read_all` that keep every multiprocessor busy."""
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return torch.empty(num_sms * _PROGRAMS_AN_SM, dtype=torch.int32, device=device)
