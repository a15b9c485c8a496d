"""How long launches take on a device: by events around the replay of a CUDA graph, so that dependent launches count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["PAST_L2_BYTES", "timer"]

PAST_L2_BYTES = 256 << 20  # what is read again has been pushed out of the L2 by then
_MIN_CALLS = 10


def timer(
    call: Callable[[], object], calls: int, device: torch.device, in_graph: bool, pool: Any = None
) -> Callable[[], float]:
    """A function that runs `call`, which makes `calls` calls, often enough, and gives the seconds of one of them.

    pool: of graphs that share their memory: what one leaves is not read.
    """
    repeats = -(-_MIN_CALLS // calls)
    if device.type != "cuda":
        return lambda: _host_s(call, calls)
    call()
    torch.cuda.synchronize()
    if in_graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            for _ in range(repeats):
                call()

        def replayed_s(_reads: object = call) -> float:  # what a graph reads has to stay where it is
            return _event_s(graph.replay, 1) / (repeats * calls)

        return replayed_s
    return lambda: _event_s(call, repeats) / calls


def _event_s(action: Callable[[], object], repeats: int) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    action()  # the clocks, and what is planned at the first call
    began.record()
    for _ in range(repeats):
        action()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / repeats


def _host_s(call: Callable[[], object], calls: int) -> float:
    began_s = time.perf_counter()
    call()
    return (time.perf_counter() - began_s) / calls
