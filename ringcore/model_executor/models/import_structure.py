"""What transformers reads in the files of its models when it is imported, kept in the user's cache.

It reads all of them for the names that they export, twice: 0.8 of the 1.2 CPU seconds that an import without torch's
compiler (`lean_imports`) takes on an EPYC, files in the page cache.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from ringcore.host.cache_folder import our_cache_folder
from ringcore.host.measurements import Measurements

__all__ = ["kept_import_structure"]

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
_MODELS = ("transformers", "models")  # the folder whose structure is kept
_BETWEEN = ","  # backends that a module needs

_Structure = dict[frozenset[str], dict[str, set[str]]]  # by backends and module: the names that it exports
_Define = Callable[..., _Structure]


@contextmanager
def kept_import_structure() -> Iterator[None]:
    """An import of transformers within it reads what an earlier one has kept."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname == _MODULE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__loader__ = module.__spec__.loader = self._own
        self._own.exec_module(module)
        define = getattr(module, _FUNCTION, None)
        if define is not None and "dev" not in version("transformers"):
            setattr(module, _FUNCTION, _kept(define))


def _kept(define: _Define) -> _Define:
    """define: transformers' function, of a folder or a file in it, and what its modules' names begin with."""
    found: dict[Path, _Structure] = {}

    @functools.wraps(define)
    def define_kept(module_path: str | os.PathLike[str], prefix: str | None = None) -> _Structure:
        path = Path(module_path)
        folder = path.parent if path.is_file() else path
        if folder.parts[-len(_MODELS) :] != _MODELS:
            return define(module_path, prefix)
        if folder not in found:
            found[folder] = _recorded(folder, lambda: define(os.fspath(folder)))
        before = "" if prefix is None else f"{prefix}."
        # Copies: the caller may add to it.
        return {
            backends: {f"{before}{module}": set(names) for module, names in modules.items()}
            for backends, modules in found[folder].items()
        }

    return define_kept


def _recorded(folder: Path, define: Callable[[], _Structure]) -> _Structure:
    with os.scandir(folder) as entries:
        changed = max((entry.stat().st_mtime_ns for entry in entries), default=0)
    key = {"transformers": version("transformers"), "folder": os.fspath(folder), "changed": str(changed)}
    kept = Measurements(Path(our_cache_folder("imports")))
    found = kept.recorded(key, "structure", _decoded, _encoded, define)
    return define() if found is None else found


def _encoded(structure: _Structure) -> Any:
    return {
        _BETWEEN.join(sorted(backends)): {module: sorted(names) for module, names in modules.items()}
        for backends, modules in structure.items()
    }


def _decoded(content: Any) -> _Structure:
    return {
        frozenset(backends.split(_BETWEEN) if backends else ()): {
            str(module): {str(name) for name in names} for module, names in dict(modules).items()
        }
        for backends, modules in dict(content).items()
    }
