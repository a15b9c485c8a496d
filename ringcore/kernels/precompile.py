"""Compiles the kernels that some code will launch, several at a time and before it runs.

The code itself says which ones: it is run once with every launch caught, for what Triton would compile for it, and left
out. So there is no list of kernels and shapes to be kept in step with the launchers.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs

__all__ = ["Variant", "catch_launches", "compile_variants"]

_ATEN = torch.ops.aten
_UNFILLED = frozenset(
    (
        _ATEN.empty.memory_format,
        _ATEN.empty_like.default,
        _ATEN.empty_strided.default,
        _ATEN.new_empty.default,
        _ATEN.new_empty_strided.default,
    )
)


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


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For kernels that do not run: memory that is asked for unfilled is zero, and so is every index, since what should
    have been written over it was not. On a GPU an index out of range costs the process its device."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        places, names = _index_arguments(func)
        args = [_zero_index(arg) if place in places else arg for place, arg in enumerate(args)]
        kwargs = {name: _zero_index(arg) if name in names else arg for name, arg in (kwargs or {}).items()}
        result = func(*args, **kwargs)
        return result.zero_() if func in _UNFILLED else result


@functools.cache
def _index_arguments(func: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Places and names of the arguments by which an operation of torch indexes; torch calls all of them so."""
    arguments = [(place, argument.name) for place, argument in enumerate(func._schema.arguments)]
    found = [(place, name) for place, name in arguments if name in ("index", "indices")]
    return frozenset(place for place, _ in found), frozenset(name for _, name in found)


def _zero_index(index: Any) -> Any:
    """Masks stay as they are."""
    if isinstance(index, list | tuple):
        return [_zero_index(part) for part in index]
    is_numbers = isinstance(index, torch.Tensor) and index.dtype != torch.bool
    return torch.zeros_like(index) if is_numbers else index


@contextmanager
def catch_launches() -> Iterator[dict[tuple[Any, str], Variant]]:
    """Within it, launches of kernels by this thread that nothing was compiled for do nothing but be entered here.

    Whatever else the code does, it does; on zeros where kernels should have written. It must not wait for a kernel.
    One thread at a time.
    """
    caught: dict[tuple[Any, str], Variant] = {}
    thread = threading.get_ident()

    def catch(*, key: str, fn: Any, compile: Mapping[str, Any], **others: Any) -> bool:
        if threading.get_ident() != thread:
            return False
        kernel = fn.jit_function
        caught[kernel, key] = Variant(kernel, compile["specialization_data"])
        return True  # go no further

    assert knobs.runtime.jit_cache_hook is None, "somebody looks at launches already"
    knobs.runtime.jit_cache_hook = catch
    try:
        with _Zeros():  # type: ignore[no-untyped-call]
            yield caught
    finally:
        knobs.runtime.jit_cache_hook = None


def compile_variants(variants: Sequence[Variant], device: torch.device, num_threads: int, first: int = 0) -> float:
    """Compiles them for `device`, begun with the one of index `first`; the seconds it took.

    Processes that share a cache on disk and begin at different places find there what others have compiled meanwhile.
    Most of a compilation is native code without the interpreter's lock, and the assembler is a process of its own.
    Raises whatever a compilation raises, when all are over.
    """
    started = time.monotonic()
    in_turn = [*variants[first:], *variants[:first]]

    is_cuda = device.type == "cuda"

    def take_device() -> None:
        if is_cuda:
            torch.cuda.set_device(device)

    with ThreadPoolExecutor(max(1, min(num_threads, len(in_turn))), initializer=take_device) as threads:
        compiled = [threads.submit(variant.compile, load=is_cuda) for variant in in_turn]
    for future in compiled:
        future.result()
    return time.monotonic() - started
