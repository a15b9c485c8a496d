"""Starts workers and calls their methods; it does not know what a model is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ringcore.errors import ConfigError

if TYPE_CHECKING:
    from ringcore.executor.base import Executor

__all__ = ["executor_class"]

_EXECUTORS = {
    "multiproc": "ringcore.executor.multiproc:MultiprocExecutor",
    "uniproc": "ringcore.executor.uniproc:UniProcExecutor",
    "ray": "ringcore.executor.ray_cluster.executor:RayExecutor",
}


def executor_class(name: str) -> type[Executor]:
    """The executor of this name: "multiproc", "uniproc" or "module:Class". Imported on demand.

    Raises `ConfigError` for a name that resolves to no subclass of `Executor`.
    """
    from ringcore.executor.base import Executor

    module_name, colon, class_name = _EXECUTORS.get(name, name).partition(":")
    found: object
    try:
        found = import_module(module_name) if colon else None
        for part in class_name.split("."):
            found = vars(found)[part]
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise _no_executor(name, f"cannot be found ({type(error).__name__}: {error})") from error
    if not (isinstance(found, type) and issubclass(found, Executor)):
        raise _no_executor(name, "is no subclass of ringcore.executor.base.Executor")
    return found


def _no_executor(name: str, why: str) -> ConfigError:
    known = ", ".join(_EXECUTORS)
    return ConfigError(
        f"executor={name!r} {why}; give one of {known}, or 'module:Class'", option="executor", value=name
    )
