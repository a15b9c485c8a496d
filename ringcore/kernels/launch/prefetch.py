"""Prefetch to L2: memory fetched before it is needed. L2 is the point of coherence of all SMs, so it cannot become
stale."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["prefetch_l2"]


@triton.jit
def prefetch_l2(pointers, in_bounds, num_bytes):
    """Prefetches num_bytes from each in-bounds pointer to the L2 cache, asynchronously.

    pointers and in_bounds: one entry per thread of the program; with fewer entries several threads would issue the same
    prefetch. num_bytes: the same for all. Pointers and num_bytes are multiples of 16, and what they span is mapped.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred in_bounds;
            setp.ne.s32 in_bounds, $2, 0;
            @in_bounds cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [pointers.to(tl.int64), in_bounds.to(tl.int32), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
