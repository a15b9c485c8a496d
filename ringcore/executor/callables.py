"""Python functions as bytes, for `collective_rpc` where the configuration allows them (`allow_callables`).

The writer of these bytes runs code in their reader. So they go one way only, from a client to its own engine's workers,
over inherited descriptors; and only this file loads a pickle.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from ringcore.errors import InvalidRequestError
from ringcore.protocol.host_tensor import to_torch

__all__ = ["call_packed", "callable_name", "pack_callable"]


def callable_name(function: Callable[..., Any]) -> str:
    """The name of a callable in messages: of a function or class, else of its type."""
    named = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    return named.__qualname__


def pack_callable(function: Callable[..., Any]) -> bytes:
    """A function, with its closure, for `call_packed`.

    Functions of `__main__`, lambdas and nested functions are sent by value; functions of other modules by name, and
    the worker must be able to import them. Raises `InvalidRequestError`.
    """
    if not callable(function):
        raise InvalidRequestError(
            f"method={function!r}: give the name of a worker method, or a function",
            field="method",
            value=repr(function),
        )
    name = callable_name(function)
    try:
        blob: bytes = cloudpickle.dumps(function)
    except Exception as error:  # any error of an object that it refers to
        raise InvalidRequestError(
            f"{name} cannot be sent to a worker: {error}; let it refer to nothing that belongs to this process "
            f"(open files, locks, sockets), and take values as arguments",
            field="method",
            value=name,
        ) from error
    return blob


def call_packed(worker: object, blob: bytes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`function(worker, *args, **kwargs)` with tensors as torch tensors. Runs the code in the bytes.

    Raises the errors of loading the function, as ModuleNotFoundError, and of the function.
    """
    function = cloudpickle.loads(blob)
    return function(worker, *to_torch(list(args)), **to_torch(dict(kwargs)))
