"""Python functions as bytes, for `collective_rpc` where the configuration allows them (`allow_callables`).

Whoever writes these bytes runs code where they are read. So they go one way only, from a client to its own engine's
workers, over descriptors that were inherited from a parent; and this file alone loads a pickle.
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
    """What a callable is called in messages: the name of a function or class, the type's of any other."""
    named = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    return named.__qualname__


def pack_callable(function: Callable[..., Any]) -> bytes:
    """A function, with what it closes over, for `call_packed`.

    One of `__main__`, a lambda and a nested function travel whole; one of another module by its name, and the worker
    must be able to import it. Raises `InvalidRequestError`.
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
    except Exception as error:  # whatever an object it refers to raises
        raise InvalidRequestError(
            f"{name} cannot be sent to a worker: {error}; let it refer to nothing that belongs to this process "
            f"(open files, locks, sockets), and take values as arguments",
            field="method",
            value=name,
        ) from error
    return blob


def call_packed(worker: object, blob: bytes, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`function(worker, *args, **kwargs)` with tensors as torch tensors. Runs whatever code is in the bytes.

    Raises what loading the function raises (ModuleNotFoundError, say), and whatever the function raises.
    """
    function = cloudpickle.loads(blob)
    return function(worker, *to_torch(list(args)), **to_torch(dict(kwargs)))
