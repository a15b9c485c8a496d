"""The processes that compile a start's kernels: begun before torch is imported, where none are listed yet."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ringcore.host.cache_folder import KERNELS, our_cache_folder
from ringcore.kernels.launch.compile_processes import CompileProcesses
from ringcore.worker.start_up.gpu_context import has_gpu_driver

__all__ = ["begin_compilers", "drop_compilers", "num_compilers", "taken_compilers"]

_FEWEST = 4  # cores: with fewer, importing torch once more takes what compiling in processes gains
_MOST = 32  # a start has some 60 kernels, and a process that compiles takes up to 90 MB
_log = logging.getLogger(__name__)
_begun: CompileProcesses | None = None


def num_compilers(num_local_ranks: int) -> int:
    """Threads that compile, of each rank of a host."""
    return min(_MOST, max(1, len(os.sched_getaffinity(0)) // num_local_ranks))


def begin_compilers(num_local_ranks: int) -> None:
    """They import torch while this process does. Where another configuration's kernels are listed this one's may be
    too, and nothing is begun before that is known."""
    global _begun
    if has_gpu_driver() and not any(Path(our_cache_folder(KERNELS)).glob("*.json")):
        _begun = _start(num_compilers(num_local_ranks))


@contextmanager
def taken_compilers(device_type: str, num_local_ranks: int) -> Iterator[CompileProcesses | None]:
    """Those that were begun, or others; closed at the end. None: threads compile."""
    global _begun
    taken, _begun = _begun, None
    if taken is None and device_type == "cuda":
        taken = _start(num_compilers(num_local_ranks))
    try:
        yield taken
    finally:
        if taken is not None:
            taken.close()


def drop_compilers() -> None:
    """Closes those that were begun and not taken."""
    with taken_compilers("", 1):
        pass


def _start(num: int) -> CompileProcesses | None:
    if num < _FEWEST:
        return None
    try:
        return CompileProcesses(num)
    except OSError as error:
        _log.warning("kernels are compiled in threads, without processes: %s", error)
        return None
