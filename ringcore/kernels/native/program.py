"""Programs: C kernels and the memory between them, recorded once and run in one call, as a CUDA graph on a GPU.

For few rows the operations of a layer take as long as calling them does, or waking a thread for them. In a program the
threads stay from one to the next.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ringcore.kernels.native.compiled import NoLibrary, load_compiled
from ringcore.kernels.native.threads import check, num_threads, parallel, set_recorded

__all__ = ["NativeProgram", "NotRecordable", "Workspace", "programs_library"]

_log = logging.getLogger(__name__)
_pointer = ctypes.c_void_p
_aten = torch.ops.aten
_VIEWS = frozenset(
    {
        *(_aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.alias.default),
        *(_aten.select.int, _aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default),
        *(_aten.unbind.int, _aten.as_strided.default, _aten.unsqueeze.default, _aten.squeeze.dim, _aten.detach.default),
        *(_aten.transpose.int, _aten.permute.default, _aten.t.default, _aten.expand.default),
    }
)
_WORKSPACE_BYTES = 64 << 20  # addresses: memory is allocated as it is used
_ALIGNMENT = 64
_Result = TypeVar("_Result")


class NotRecordable(Exception):
    """The operation that is no C kernel, or the memory that is missing."""


class Workspace:
    """The memory between the kernels of programs, which share it: one runs at a time."""

    def __init__(self, num_bytes: int = _WORKSPACE_BYTES) -> None:
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._used: list[tuple[int, int, StorageWeakRef]] = []  # first byte, end, and what is there; ascending

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Its memory is used again when the last tensor that views it is gone. Raises `NotRecordable`."""
        count = math.prod(shape)
        size = -(-max(1, count * dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT
        self._used = [place for place in self._used if not place[2].expired()]  # type: ignore[no-untyped-call]
        first = index = 0
        while index < len(self._used) and self._used[index][0] - first < size:
            first = self._used[index][1]
            index += 1
        if first + size > len(self._memory):
            raise NotRecordable(f"{size} bytes more between kernels than the {len(self._memory)} of a workspace")
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=max(1, count), offset=first)[:count].view(shape)
        self._used.insert(index, (first, first + size, StorageWeakRef(tensor.untyped_storage())))  # type: ignore[no-untyped-call]
        return tensor


class _OnlyKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what would compute while calls are recorded; gives new tensors memory of the workspace."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else the first call would import torch's compiler: 70 MB of a worker, and a second."""
        return False

    def __init__(self, workspace: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._workspace = workspace

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
        if func is _aten.new_empty.default:
            return self._workspace.empty(tuple(args[1]), kwargs.get("dtype") or args[0].dtype)
        if func is _aten.empty.memory_format:
            return self._workspace.empty(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
        with self:  # an operation of others, such as `reshape`, which inference mode leaves whole
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise NotRecordable(str(func))
        return result


class NativeProgram:
    """Of the kernels that a function calls. Their inputs must stay where they are, and results are overwritten when the
    next program of the workspace runs."""

    def __init__(self, library: ctypes.CDLL, workspace: Workspace) -> None:
        self._library, self._workspace = library, workspace
        self._address = library.program_new()
        check(0 if self._address else -1)
        self._results: object = None

    def __del__(self) -> None:
        if self._address:
            self._library.program_free(self._address)

    def record(self, function: Callable[[], _Result]) -> _Result:
        """Calls `function`, of which nothing is computed. Raises `NotRecordable`; the program is then of no use."""
        with self._recording(), _OnlyKernels(self._workspace):
            results = function()
        self._results = results
        return results

    @contextmanager
    def _recording(self) -> Iterator[None]:
        set_recorded(self._address)
        try:
            yield
        finally:
            set_recorded(None)

    def run(self) -> None:
        check(self._library.program_run(self._address, parallel(), num_threads()))


@functools.cache
def programs_library() -> ctypes.CDLL | None:
    """None where it cannot be compiled, which is logged once."""
    try:
        library = load_compiled("program.c")
    except NoLibrary as reason:
        _log.info("the kernels of a step are called one by one: %s", reason)
        return None
    library.program_new.restype = _pointer
    library.program_free.argtypes = (_pointer,)
    library.program_free.restype = None
    library.program_run.argtypes = _pointer, _pointer, ctypes.c_int32
    return library
