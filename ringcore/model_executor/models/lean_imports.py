"""Imports of transformers' modeling code without torch's compiler and DTensor.

Two thirds of such an import are modules of which nothing is run here: `torch._dynamo`, for decorators of what must not
be compiled and a context that one kind of mask needs, and `torch.distributed.tensor`, for a parallelism of its own, by
which sympy comes. Seconds on an EPYC, files in the page cache: 3.4 for Qwen3's, 0.8 without them. torchvision, where it
is installed, would come for images, and asks for the compiler: it is left out too.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from ringcore.host.import_structure import kept_import_structure

__all__ = ["without_compiler"]

_COMPILER = "torch._dynamo"
_WRAPPED = f"{_COMPILER}._trace_wrapped_higher_order_op"
_CONTEXT = "TransformGetItemToIndex"  # of the second
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")
_AVAILABLE = tuple(  # of transformers
    f"is_{package}_available"
    for package in ("accelerate", "scipy", "sklearn", "torch_distributed", "torchaudio", "torchvision")
)
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
    compiler.__path__ = []  # a package, whose other modules `_Submodules` finds
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


class _Submodules(MetaPathFinder):
    """An import of another module of the package takes the package itself first."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_COMPILER}.") or not isinstance(sys.modules.get(_COMPILER), _StandIn):
            return None
        _remove_stand_ins()
        return spec_from_loader(fullname, _Imported(importlib.import_module(fullname)))


class _Imported(Loader):
    """Of a module that is imported already."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _LeanImports:
    """Counted: the kernel warm-up builds models on another thread at the same time."""

    def __init__(self) -> None:
        self._lock, self._depth = threading.Lock(), 0
        self._submodules = _Submodules()
        self._replaced: list[tuple[ModuleType, str, Callable[[], bool]]] = []

    def begin(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth > 1 or _COMPILER in sys.modules:
                return
            sys.modules.update(_stand_ins())
            sys.meta_path.insert(0, self._submodules)
            with kept_import_structure():
                modules = [importlib.import_module(name) for name in ("transformers.utils", _IMPORTS)]
            for module, name in itertools.product(modules, _AVAILABLE):
                if hasattr(module, name):
                    self._replaced.append((module, name, getattr(module, name)))
                    setattr(module, name, lambda: False)

    def end(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                while self._replaced:
                    setattr(*self._replaced.pop())
                if self._submodules in sys.meta_path:
                    sys.meta_path.remove(self._submodules)
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
