"""Memory asked for before it is needed: into the L2 cache, which is where all programs meet, so it stays true."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["ask_for"]


@triton.jit
def ask_for(pointers, exists, num_bytes):
    """Has the L2 cache fetch num_bytes from each pointer that exists; nobody waits for it.

    pointers and exists: an entry for each thread of the program; with fewer, some threads would ask for the same.
    num_bytes: the same for all. Pointers and num_bytes are multiples of 16, and what they span is mapped.
    """
    tl.inline_asm_elementwise(
        """{
            .reg .pred exists;
            setp.ne.s32 exists, $2, 0;
            @exists cp.async.bulk.prefetch.L2.global [$1], $3;
            mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [pointers.to(tl.int64), exists.to(tl.int32), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
