"""Compiles the kernels that some code will launch, several at a time and before it runs.

The code itself says which ones: it is run once with every launch caught, for what Triton would compile for it, and left
out. So there is no list of kernels and shapes to be kept in step with the launchers.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from triton import JITFunction, knobs

__all__ = ["Variant", "catch_launches", "compile_variants"]


class Variant(NamedTuple):
    """A kernel as one launch needs it."""

    kernel: Any  # a JITFunction
    specialization: str  # Triton's own record of types, constants, alignments and options

    def compile(self, *, load: bool) -> None:
        """Leaves the binary where this process's next launch finds it, and in Triton's cache on disk.

        load: onto the current device too, which a first launch would do, and make what calls it from Python.
        """
        compiled = self.kernel.preload(self.specialization)
        if load:
            _ = compiled.run  # makes both as it is asked for


@contextmanager
def catch_launches() -> Iterator[dict[tuple[Any, str], Variant]]:
    """Within it, launches of kernels by this thread do nothing; those that nothing was compiled for are entered here.

    Whatever else the code does, it does, on whatever memory has where kernels should have written. So it must not wait
    for a kernel, nor use as an index what one writes, unless something harmless stood there before: on a GPU, an index
    out of range costs the process its device. (So a kernel that is compiled already is left out too: others may have
    been to write what it would read.) One thread at a time.
    """
    caught: dict[tuple[Any, str], Variant] = {}
    thread = threading.get_ident()

    def catch(*, key: str, fn: Any, compile: Mapping[str, Any], **others: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        kernel = fn.jit_function
        caught[kernel, key] = Variant(kernel, compile["specialization_data"])
        return True  # go no further

    launch = JITFunction.run

    def leave_out(self: JITFunction, *args: Any, warmup: bool, **others: Any) -> Any:
        if threading.get_ident() != thread:
            return launch(self, *args, warmup=warmup, **others)
        launch(self, *args, warmup=True, **others)  # which stops short of the device
        return None

    assert knobs.runtime.jit_cache_hook is None, "somebody looks at launches already"
    knobs.runtime.jit_cache_hook, JITFunction.run = catch, leave_out
    try:
        yield caught
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.run = None, launch


def compile_variants(variants: Sequence[Variant], device: torch.device, num_threads: int, first: int = 0) -> float:
    """Compiles them for `device`, the longest first, begun with the one of index `first` in that order; the seconds it
    took.

    Processes that share a cache on disk and begin at different places find there what others have compiled meanwhile.
    Most of a compilation is native code without the interpreter's lock, and the assembler is a process of its own.
    Raises whatever a compilation raises, when all are over.
    """
    started = time.monotonic()
    by_length = sorted(variants, key=lambda variant: _source_length(variant.kernel), reverse=True)
    in_turn = [*by_length[first:], *by_length[:first]]
    is_cuda = device.type == "cuda"

    def take_device() -> None:
        if is_cuda:
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(max(1, min(num_threads, len(in_turn))), initializer=take_device) as threads:
        compiled = [threads.submit(variant.compile, load=is_cuda) for variant in in_turn]
    for variant, future in zip(in_turn, compiled, strict=True):
        try:
            future.result()
        except SystemError:  # of CPython before 3.11.8 and 3.12.2, now and then, where two threads parse at a time
            variant.compile(load=is_cuda)
    return time.monotonic() - started


def _source_length(kernel: Any) -> int:
    """Characters of a kernel and of all that it calls: how long it takes to compile, more or less."""
    sources, waiting = {kernel.src}, [kernel]
    while waiting:
        caller = waiting.pop()
        for name in set(re.findall(r"\w+", caller.src)):
            called = caller.fn.__globals__.get(name)
            if isinstance(called, JITFunction) and called.src not in sources:
                sources.add(called.src)
                waiting.append(called)
    return sum(map(len, sources))
