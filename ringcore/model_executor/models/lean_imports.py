"""Imports of transformers' modeling code without torch's compiler and DTensor.

Two thirds of such an import are modules of which nothing is run here: `torch._dynamo`, for decorators of what must not
be compiled and a context that one kind of mask needs, and `torch.distributed.tensor`, for a parallelism of its own, by
which sympy comes. Seconds on an EPYC, files in the page cache: 3.4 for Qwen3's, 0.8 without them.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from ringcore.model_executor.models.import_structure import kept_import_structure

__all__ = ["without_compiler"]

_COMPILER = "torch._dynamo"
_WRAPPED = f"{_COMPILER}._trace_wrapped_higher_order_op"
_CONTEXT = "TransformGetItemToIndex"  # of the second
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
_AVAILABLE = "is_torch_distributed_available"  # of transformers
_IMPORTS = "transformers.utils.import_utils"


class _StandIn(ModuleType):
    """In the place of a module, until something is asked for that it does not have: then the module is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # `inspect` asks every module for its file
            raise AttributeError(name)
        _remove_stand_ins()
        return getattr(importlib.import_module(self.__name__), name)


def _stand_ins() -> dict[str, ModuleType]:
    compiler, wrapped = _StandIn(_COMPILER), _StandIn(_WRAPPED)
    found = find_spec(_COMPILER)
    compiler.__path__ = list(found.submodule_search_locations or ()) if found is not None else []
    for name in _DECORATORS:
        setattr(compiler, name, _undecorated)
    setattr(wrapped, _CONTEXT, lambda *args: getattr(importlib.import_module(_WRAPPED), _CONTEXT)(*args))
    return {_COMPILER: compiler, _WRAPPED: wrapped}


def _undecorated(function: Callable[..., Any] | None = None, *_args: object, **_options: object) -> Any:
    return _undecorated if function is None else function


def _remove_stand_ins() -> None:
    for name in (_COMPILER, _WRAPPED):
        if isinstance(sys.modules.get(name), _StandIn):
            del sys.modules[name]


class _LeanImports:
    """Counted: the kernel warm-up builds models on another thread at the same time."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.Lock(), 0
        self._replaced: list[tuple[ModuleType, Callable[[], bool]]] = []

    def begin(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1 or _COMPILER in sys.modules:
                return
            sys.modules.update(_stand_ins())
            with kept_import_structure():
                modules = [importlib.import_module(name) for name in ("transformers.utils", _IMPORTS)]
            for module in modules:
                self._replaced.append((module, getattr(module, _AVAILABLE)))
                setattr(module, _AVAILABLE, lambda: False)

    def end(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                while self._replaced:
                    module, function = self._replaced.pop()
                    setattr(module, _AVAILABLE, function)
                _remove_stand_ins()


_LEAN = _LeanImports()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Within it, modules of transformers are imported as said above, and stay so: they go on without DTensor. For a
    process where nothing else is done with them."""
    try:
        _LEAN.begin()
        yield
    finally:
        _LEAN.end()
