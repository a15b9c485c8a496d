"""Programmatic dependent launch: a kernel's programs may start, and load what no kernel before them writes (weights),
while the kernel before it still runs. CUDA C++ programming guide, "Programmatic dependent launch"; Hopper and later.

A kernel that takes part has a constexpr `pdl`, is launched with `launch_options(pdl)`, and keeps to this:

    if pdl:
        gdc_launch_dependents()   # the next kernel may start now
    ...                           # loads of weights alone
    if pdl:
        gdc_wait()                # everything before has ended and its writes are seen
    ...                           # loads of what other kernels wrote, and every store

Every kernel that lets the next one start waits itself, before it ends: so who waits for the kernel before it has waited
for all before that one too. A load before the wait must not be of memory that any kernel of a step writes; but for
what was written before an ordinary kernel of the same step, which starts when everything before it has ended. The plan
of the decode kernel is such: the embedding stands between.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["gdc_launch_dependents", "gdc_wait", "launch_options", "overlaps_launches"]

_SINCE = (9, 0)  # compute capability


@functools.cache
def overlaps_launches(device: torch.device) -> bool:
    """Whether kernels on `device` should be given pdl=True; no interpreter has it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _SINCE


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keywords of a launch: nothing where it is off, which an interpreter would not understand."""
    return {"launch_pdl": True} if pdl else {}
