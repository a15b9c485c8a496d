"""Programmatic dependent launch (PDL): a kernel's programs may start, and load what no kernel before them writes
(weights), while the kernel before it still runs. CUDA C++ programming guide, "Programmatic dependent launch"; Hopper
and later.

A kernel that takes part has a constexpr `pdl`, is launched with `launch_options(pdl)`, and keeps to this:

    if pdl:
        gdc_launch_dependents()   # the next kernel may start now
    ...                           # loads of weights alone
    if pdl:
        gdc_wait()                # everything before has ended and its writes are visible
    ...                           # loads of what other kernels wrote, and every store

Every kernel that calls gdc_launch_dependents also calls gdc_wait before it ends: so a kernel that waits for the one
before it has waited for all before that too. A load before the wait must not touch memory that any kernel of a step
writes, except what was written before an ordinary (non-PDL) kernel of the same step, which starts only when everything
before it has ended. The inputs and the tile ranges of a decode step are such: the embedding, an ordinary launch
(`gather_rows`), comes in between. A kernel that
launches its dependents after its own wait is as good: everything before it has ended when the next one starts, which
reads that past the L1 cache (`experts_fma`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_options", "supports_pdl"]

_SINCE = (9, 0)  # compute capability


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether kernels on `device` should be launched with pdl=True; the interpreter has no PDL."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _SINCE


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a launch: none without PDL, because the interpreter does not know them."""
    return {"launch_pdl": True} if pdl else {}
