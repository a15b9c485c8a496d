"""The end of a step on the device: what the last kernel's programs have written becomes visible to the host."""

from __future__ import annotations

import triton
import triton.language as tl

from ringcore.kernels.steps.step_state import ARRIVALS, STEP_COUNT

__all__ = ["end_step"]


@triton.jit
def end_step(state, slot, step, is_compiled: tl.constexpr):
    """The end of each program of the kernel; the last one to arrive writes the step's number to its slot of the ring.

    is_compiled: False in the interpreter, which has no fences.
    """
    tl.debug_barrier()  # all threads have written before the program arrives
    arrived = tl.atomic_add(state + ARRIVALS, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        tl.store(state + ARRIVALS, 0)
        tl.store(state + STEP_COUNT, step + 1)
        if is_compiled:
            # Release: the host sees the writes of all programs before it sees the step number.
            tl.inline_asm_elementwise(
                "fence.acq_rel.sys; st.release.sys.global.b32 [$1], $2; mov.b32 $0, 0;",
                "=r,l,r",
                [slot.to(tl.int64), step + 1],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.store(slot, step + 1)
