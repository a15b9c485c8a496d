"""What the GPU does in a search for tiles (`tile_search`)."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.errors import TritonError

from ringcore.kernels.launch.compile_processes import CompileProcesses
from ringcore.kernels.launch.device_timer import timer
from ringcore.kernels.launch.precompile import compile_variants, intercept_launches
from ringcore.worker.start_up.compilers import num_compilers, taken_compilers
from ringcore.worker.start_up.tile_search import Timer

__all__ = ["DeviceBench"]

_log = logging.getLogger(__name__)

# A compiler or a launcher that refuses a tile, or shared memory that is too small. An error of the device itself is an
# `AcceleratorError` of torch, after which nothing can be launched: the next launch says so.
_REFUSED = (TritonError, RuntimeError, AssertionError)


class DeviceBench:
    def __init__(self, device: torch.device, num_stages: int) -> None:
        """num_stages: whose first ranks search at the same time, perhaps on one host; the others wait."""
        self.device = device
        self._pool: Any = None  # of the graphs of one problem
        self._num_stages, self._ending = num_stages, contextlib.ExitStack()

    def close(self) -> None:
        """Ends the processes that compile."""
        self._ending.close()

    @functools.cached_property
    def _compilers(self) -> CompileProcesses | None:
        """Begun when something is to be compiled: most starts search nothing."""
        return self._ending.enter_context(taken_compilers(self.device.type, self._num_stages))

    def compile(self, launches: Sequence[Callable[[], object]]) -> None:
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        with intercept_launches() as intercepted:
            for launch in launches:
                with contextlib.suppress(*_REFUSED):
                    launch()
        try:
            variants = list(intercepted.values())
            compile_variants(variants, self.device, num_compilers(self._num_stages), self._compilers)
        except _REFUSED as error:  # it is refused again when it is launched
            _log.debug("a tile cannot be compiled: %s", error)

    def timer(self, run: Callable[[], object]) -> Timer | None:
        try:
            return timer(run, 1, self.device, in_graph=True, pool=self._pool)
        except _REFUSED as error:
            _log.debug("a tile cannot be launched: %s", error)
            return None

    def result(self, run: Callable[[], torch.Tensor]) -> torch.Tensor | None:
        try:
            found = run()
            torch.cuda.synchronize(self.device)
        except _REFUSED as error:
            _log.debug("a tile cannot be launched: %s", error)
            return None
        return found
