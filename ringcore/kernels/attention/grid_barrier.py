"""A barrier over all programs of a launch, for a kernel whose grid the device runs at once."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["grid_barrier"]

_ARRIVED = tl.constexpr(0)  # programs that have arrived; 0 between barriers
_GENERATION = tl.constexpr(1)  # barriers that are over; it wraps around
# About a second. Programs that have not arrived by then do not run beside this one: the device must not hang.
_MAX_READS = tl.constexpr(1 << 20)


@triton.jit
def grid_barrier(state, num_programs):
    """Waits until every program of the launch has called this -> whether they have. What they wrote before is visible
    after; it is read past the L1 cache (.cg).

    state: [2] int32, zeros before the first launch that uses it; launches that share it must not overlap.
    """
    # An atomic, not a load: one thread reads, and all have the same number.
    generation = tl.atomic_add(state + _GENERATION, 0, sem="relaxed", scope="gpu")
    tl.debug_barrier()  # all threads have written, and know the generation, before the program arrives
    arrived = tl.atomic_add(state + _ARRIVED, 1, sem="acq_rel", scope="gpu")
    is_over = arrived == num_programs - 1
    if is_over:
        tl.atomic_xchg(state + _ARRIVED, 0, sem="relaxed", scope="gpu")
        tl.atomic_add(state + _GENERATION, 1, sem="release", scope="gpu")
    reads = tl.where(is_over, _MAX_READS, 0)
    while reads < _MAX_READS:
        is_over = tl.atomic_add(state + _GENERATION, 0, sem="acquire", scope="gpu") != generation
        reads = tl.where(is_over, _MAX_READS, reads + 1)
    tl.debug_barrier()  # no thread reads before the one that waited has seen the end
    return is_over
