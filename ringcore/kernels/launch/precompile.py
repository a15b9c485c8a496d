"""Kernel warm-up: compiles the Triton kernels that some code will launch, in parallel and before it runs.

The code is run once with all kernel launches intercepted: each launch is recorded with what Triton would compile for
it, and skipped. So there is no list of kernels and shapes to maintain beside the launchers.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import re
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from triton import JITFunction, knobs
from triton.runtime import driver
from triton.runtime.cache import triton_key

from ringcore.kernels.launch.compile_processes import CompileProcesses, CompileRequest
from ringcore.kernels.launch.cuda_kernel import CudaKernel
from ringcore.kernels.launch.launcher_modules import copy_loaded_modules

__all__ = [
    "KernelCompiler",
    "NotLaunchedError",
    "Variant",
    "compile_variants",
    "hash_compiler",
    "intercept_launches",
]


copy_loaded_modules()

_HASHING = threading.Lock()
# Of a kernel's cache of a device, which is made when it is first asked for: two threads would make two, and what one of
# them compiled would be compiled again.
_BINDING = threading.Lock()


class NotLaunchedError(Exception):
    """A kernel was intercepted whose result the caller reads: the caller filled it with NaN, and finds that."""


class Variant(NamedTuple):
    """A kernel specialisation, as one launch needs it."""

    kernel: Any  # a JITFunction or a CudaKernel
    specialization: str  # Triton's own record of types, constants, alignments and options; or `CudaKernel`'s

    def compile(self, *, load: bool) -> Any:
        """Puts the binary where this process's next launch finds it, and into Triton's cache on disk; -> Triton's
        compiled kernel.

        load: also loads it onto the current device and builds its launcher, as a first launch would.
        """
        with _BINDING:
            _ = self.kernel.device_caches[driver.active.get_current_device()]
        compiled = self.kernel.preload(self.specialization)
        if load:
            _ = compiled.run  # the property loads and builds
        return compiled

    def request(self) -> CompileRequest:
        target = driver.active.get_current_target()
        place = (target.backend, target.arch, target.warp_size)
        return CompileRequest(self.kernel.fn.__module__, self.kernel.fn.__name__, self.specialization, place)


@contextmanager
def intercept_launches(found: Callable[[Variant], object] = lambda _: None) -> Iterator[dict[tuple[Any, str], Variant]]:
    """Inside the context kernel launches of this thread do nothing; the variants that are not compiled yet are entered
    here, and `found` is called with each.

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
        enter(fn.jit_function, key, compile["specialization_data"])
        return True  # Triton stops here

    def enter(kernel: Any, key: str, specialization: str) -> None:
        if (kernel, key) not in intercepted:
            intercepted[kernel, key] = variant = Variant(kernel, specialization)
            found(variant)

    def intercept(kernel: CudaKernel, specialization: str) -> bool:
        if threading.get_ident() != thread:
            return False
        if not kernel.is_loaded(specialization):
            enter(kernel, specialization, specialization)
        return True

    launch = JITFunction.run

    def skip_launch(self: JITFunction, *args: Any, warmup: bool, **others: Any) -> Any:
        if threading.get_ident() != thread:
            return launch(self, *args, warmup=warmup, **others)
        launch(self, *args, warmup=True, **others)  # stops before the device
        return None

    assert knobs.runtime.jit_cache_hook is None, "a JIT cache hook is already installed"
    knobs.runtime.jit_cache_hook, JITFunction.run, CudaKernel.interceptor = record, skip_launch, intercept
    try:
        yield intercepted
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run, CudaKernel.interceptor = None, launch, None


def hash_compiler() -> None:
    """Triton hashes itself, 400 MB of library, for the names of its files on disk: once a process, in the first thread
    that needs it. The GIL is released meanwhile."""
    with _HASHING:
        triton_key()


class KernelCompiler:
    """Compiles variants in threads as they are added, of those that wait the longest first. A context manager: at its
    end all are compiled, and it raises what a compilation raised.

    Ranks that share a cache on disk begin with other variants, and reuse what the others have compiled meanwhile. Much
    of a compilation is native code that releases the GIL; for the rest `processes` do it, one for each thread.
    """

    def __init__(
        self,
        device: torch.device,
        num_threads: int,
        share: tuple[int, int] = (0, 1),
        processes: CompileProcesses | None = None,
    ) -> None:
        """share: rank, and the number of ranks. processes: as many as threads, or more."""
        self._device, self._share, self._processes = device, share, processes
        self._changed = threading.Condition()
        self._waiting: list[tuple[bool, int, int, Variant]] = []  # a heap; the third is a number of its own
        self._numbers, self._has_ended = itertools.count(), False
        self._lost: list[Variant] = []
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def add(self, *variants: Variant) -> None:
        rank, num_ranks = self._share
        with self._changed:
            for one in variants:
                is_others = zlib.crc32(one.specialization.encode()) % num_ranks != rank
                entry = is_others, -_source_length(one.kernel), next(self._numbers), one
                heapq.heappush(self._waiting, entry)
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for variant in self._lost:
            self._compile(variant)
        if self._errors:
            raise self._errors[0]

    def _run(self, index: int) -> None:
        while (variant := self._next()) is not None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # of this thread
                if self._processes is not None:
                    self._processes.compile(index, variant.request())
                self._compile(variant)
            except SystemError:  # CPython before 3.11.8 and 3.12.2: a race between threads that parse
                self._lost.append(variant)
            except Exception as error:
                self._errors.append(error)

    def _next(self) -> Variant | None:
        """None when all are compiled, and no other will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._has_ended)
            return heapq.heappop(self._waiting)[-1] if self._waiting else None

    def _compile(self, variant: Variant) -> None:
        hash_compiler()
        variant.compile(load=self._device.type == "cuda")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is not None:
            with self._changed:
                self._waiting.clear()
        try:
            self.finish()
        except Exception:
            if kind is None:  # else what it raised is not hidden
                raise


def compile_variants(
    variants: Sequence[Variant], device: torch.device, num_threads: int, processes: CompileProcesses | None = None
) -> None:
    """Compiles `variants` by a `KernelCompiler`. Raises what a compilation raised, after all have ended."""
    with KernelCompiler(device, max(1, min(num_threads, len(variants))), processes=processes) as compiler:
        compiler.add(*variants)


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
