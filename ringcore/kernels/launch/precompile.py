"""Kernel warm-up: compiles the Triton kernels that some code will launch, in parallel and before it runs.

The code is run once with all kernel launches intercepted: each launch is recorded with what Triton would compile for
it, and skipped. So there is no list of kernels and shapes to maintain beside the launchers.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton import JITFunction, knobs
from triton.runtime.cache import triton_key

from ringcore.kernels.launch.launcher_modules import copy_loaded_modules

__all__ = ["NotLaunchedError", "Variant", "compile_variants", "hash_compiler", "intercept_launches"]


copy_loaded_modules()


class NotLaunchedError(Exception):
    """A kernel was intercepted whose result the caller reads: the caller filled it with NaN, and finds that."""


class Variant(NamedTuple):
    """A kernel specialisation, as one launch needs it."""

    kernel: Any  # a JITFunction
    specialization: str  # Triton's own record of types, constants, alignments and options

    def compile(self, *, load: bool) -> None:
        """Puts the binary where this process's next launch finds it, and into Triton's cache on disk.

        load: also loads it onto the current device and builds its launcher, as a first launch would.
        """
        compiled = self.kernel.preload(self.specialization)
        if load:
            _ = compiled.run  # the property loads and builds


@contextmanager
def intercept_launches() -> Iterator[dict[tuple[Any, str], Variant]]:
    """Inside the context kernel launches of this thread do nothing; the variants that are not compiled yet are entered
    here.

    All other code runs as usual, on whatever the memory holds where kernels should have written. So it must not wait
    for a kernel, nor use kernel output as an index, unless the memory held valid indices before: on a GPU, an
    out-of-bounds index costs the process its CUDA context. (For this reason a kernel that is compiled already is
    skipped too: the kernels that should write its inputs may have been skipped.) One thread at a time.
    """
    intercepted: dict[tuple[Any, str], Variant] = {}
    thread = threading.get_ident()

    def record(*, key: str, fn: Any, compile: Mapping[str, Any], **others: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        kernel = fn.jit_function
        intercepted[kernel, key] = Variant(kernel, compile["specialization_data"])
        return True  # Triton stops here

    launch = JITFunction.run

    def skip_launch(self: JITFunction, *args: Any, warmup: bool, **others: Any) -> Any:
        if threading.get_ident() != thread:
            return launch(self, *args, warmup=warmup, **others)
        launch(self, *args, warmup=True, **others)  # stops before the device
        return None

    assert knobs.runtime.jit_cache_hook is None, "a JIT cache hook is already installed"
    knobs.runtime.jit_cache_hook, JITFunction.run = record, skip_launch
    try:
        yield intercepted
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run = None, launch


def hash_compiler() -> None:
    """Triton hashes itself, 400 MB of library, for the names of its files on disk: once a process, unless several
    threads need it at once, which then do the same. The GIL is released meanwhile."""
    triton_key()


def compile_variants(variants: Sequence[Variant], device: torch.device, num_threads: int, first: int = 0) -> float:
    """Compiles `variants` for `device`, the longest first, beginning at index `first` of that order; returns the
    seconds it took.

    Processes that share a cache on disk and begin at different indices reuse what the others have compiled meanwhile.
    Most of a compilation is native code that releases the GIL, and the assembler is a process of its own. Raises what a
    compilation raised, after all have ended.
    """
    started = time.monotonic()
    by_length = sorted(variants, key=lambda variant: _source_length(variant.kernel), reverse=True)
    ordered = [*by_length[first:], *by_length[:first]]
    is_cuda = device.type == "cuda"

    def set_device() -> None:
        if is_cuda:
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(max(1, min(num_threads, len(ordered))), initializer=set_device) as threads:
        compiled = [threads.submit(variant.compile, load=is_cuda) for variant in ordered]
    for variant, future in zip(ordered, compiled, strict=True):
        try:
            future.result()
        except SystemError:  # CPython before 3.11.8 and 3.12.2: a race between threads that parse
            variant.compile(load=is_cuda)
    return time.monotonic() - started


@functools.cache
def _source_length(kernel: Any) -> int:
    """Characters of a kernel and of everything it calls: roughly proportional to its compile time."""
    sources, waiting = {kernel.src}, [kernel]
    while waiting:
        caller = waiting.pop()
        for name in set(re.findall(r"\w+", caller.src)):
            called = caller.fn.__globals__.get(name)
            if isinstance(called, JITFunction) and called.src not in sources:
                sources.add(called.src)
                waiting.append(called)
    return sum(map(len, sources))
