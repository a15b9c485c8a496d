"""Pickled Python functions for `collective_rpc`, where the configuration allows them (`allow_callables`).

A process that writes these bytes runs code in the process that loads them. So they go one way only, from a client to
the workers of its own engine, over inherited file descriptors; and this module is the only one that loads a pickle.
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
    """The name of a callable for messages: that of a function or class, else that of its type."""
    named = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    return named.__qualname__


def pack_callable(function: Callable[..., Any]) -> bytes:
    """Pickles a function with its closure, for `call_packed`.

    Functions of `__main__`, lambdas and nested functions are pickled by value; a function of another module by
    reference, so that the worker must be able to import it. Raises `InvalidRequestError`.
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
    except Exception as error:  # anything that pickling a referenced object raises
        raise InvalidRequestError(
            f"{name} cannot be sent to a worker: {error}; let it refer to nothing that belongs to this process "
            f"(open files, locks, sockets), and take values as arguments",
            field="method",
            value=name,
        ) from error
    return blob


def call_packed(worker: object, blob: bytes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`function(worker, *args, **kwargs)` with tensors as torch tensors. Unpickling `blob` executes its code.

    Raises what unpickling raises (e.g. ModuleNotFoundError), and what the function raises.
    """
    function = cloudpickle.loads(blob)
    return function(worker, *to_torch(list(args)), **to_torch(dict(kwargs)))
