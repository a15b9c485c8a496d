"""What transformers reads when it is imported, kept in the user's cache: names in the files of its models, and names
of installed packages.

It reads the files of all its models for the names that they export, twice: 0.8 of the 1.2 CPU seconds that an import
without torch's compiler (`lean_imports`) takes on an EPYC, files in the page cache. Before 5.23 it also asks for the
packages of all that is installed, 0.3 seconds with 150 distributions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from ringcore.host.cache_folder import our_cache_folder
from ringcore.host.measurements import Measurements

__all__ = ["has_import_structure", "keep_import_structure", "kept_import_structure"]

_MODULE, _FUNCTION = "transformers.utils.import_utils", "define_import_structure"
_MODELS = ("transformers", "models")  # the folder whose structure is kept
_INFO = ".dist-info", ".egg-info", ".egg"  # how names of folders end that describe a distribution
_STRUCTURE = "structure"
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


def keep_import_structure() -> None:
    """Imports transformers, and so reads what is not kept."""
    with kept_import_structure():
        importlib.import_module(_MODULE)


def has_import_structure() -> bool:
    """Whether it is kept, or cannot be."""
    spec = PathFinder.find_spec(_MODELS[0])
    if spec is None or spec.origin is None:
        return True
    kept = _kept_measurements()
    key = _key(Path(spec.origin).parent / _MODELS[1])
    return kept.read(key, _STRUCTURE, bool) or not kept.can_record()


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
        with _kept_packages():
            self._own.exec_module(module)
        define = getattr(module, _FUNCTION, None)
        if define is not None and "dev" not in version("transformers"):
            setattr(module, _FUNCTION, _kept(define))


@contextmanager
def _kept_packages() -> Iterator[None]:
    """`importlib.metadata.packages_distributions` reads what an earlier call within it has kept."""
    own = importlib.metadata.packages_distributions

    def packages_distributions() -> Mapping[str, list[str]]:
        found = _kept_measurements().recorded({"installed": _installed()}, "packages", _packages, dict, own)
        return own() if found is None else found

    importlib.metadata.packages_distributions = packages_distributions
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = own


def _installed() -> str:
    """Another where other distributions, or other versions, are installed."""
    found = []
    for place in map(Path, sys.path):  # "": the working directory
        with suppress(OSError):  # what cannot be read, Python leaves out too
            infos = [entry for entry in place.iterdir() if entry.name.endswith(_INFO)] if place.is_dir() else [place]
            found += sorted(f"{one} {one.stat().st_mtime_ns}" for one in infos)
    return hashlib.sha256("\n".join(found).encode()).hexdigest()


def _packages(content: Any) -> Mapping[str, list[str]]:
    return {str(package): [str(name) for name in names] for package, names in dict(content).items()}


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
    found = _kept_measurements().recorded(_key(folder), _STRUCTURE, _decoded, _encoded, define)
    return define() if found is None else found


def _key(folder: Path) -> dict[str, str]:
    with os.scandir(folder) as entries:
        changed = max((entry.stat().st_mtime_ns for entry in entries), default=0)
    return {"transformers": version("transformers"), "folder": os.fspath(folder), "changed": str(changed)}


def _kept_measurements() -> Measurements:
    return Measurements(Path(our_cache_folder("imports")))


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
