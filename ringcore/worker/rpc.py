"""The methods of a worker that can be called from outside it, and how a call reaches one.

A method can be called only if it is declared with `@rpc`; its arguments are checked against its annotations. This
module loads no torch, since whoever has no device may still want to know what can be called.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import msgspec
import numpy as np

from ringcore.errors import InvalidRequestError
from ringcore.host_tensor import to_torch

__all__ = ["call_rpc", "find_rpc", "read_only_names", "rpc", "rpc_names"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_IS_READ_ONLY = "__ringcore_rpc_is_read_only__"  # a declared function has this attribute


@overload
def rpc(method: _Method) -> _Method: ...


@overload
def rpc(*, read_only: bool = False) -> Callable[[_Method], _Method]: ...


def rpc(method: Any = None, *, read_only: bool = False) -> Any:
    """Declares that a worker's method may be called by name: `@rpc`, or `@rpc(read_only=True)`.

    A read-only method touches nothing that a step changes: another thread of the worker may execute it while a step
    runs. Raises TypeError for anything but a public function.
    """

    def declare(function: _Method) -> _Method:
        if not inspect.isfunction(function) or function.__name__.startswith("_"):
            raise TypeError(f"@rpc declares a public method, not {function!r}; put it below other decorators")
        vars(function)[_IS_READ_ONLY] = read_only
        return function

    return declare if method is None else declare(method)


def rpc_names(worker: object) -> list[str]:
    """The names that `call_rpc` would find, sorted."""
    names = {name for cls in type(worker).__mro__ for name in vars(cls)}
    return sorted(name for name in names if _declared(worker, name))


def read_only_names(worker: object) -> list[str]:
    """Those of `rpc_names` that are declared read-only, sorted."""
    return [name for name in rpc_names(worker) if vars(_declared(worker, name))[_IS_READ_ONLY]]


def _declared(worker: object, name: str) -> Callable[..., Any] | None:
    """The declared function of this name. The first class in the resolution order that has the name decides."""
    for cls in type(worker).__mro__:
        if name in vars(cls):
            found = vars(cls)[name]
            return found if inspect.isfunction(found) and _IS_READ_ONLY in vars(found) else None
    return None


def find_rpc(worker: object, method: str) -> types.MethodType:
    """The declared method, bound. Raises `InvalidRequestError` that names the known ones."""
    function = _declared(worker, method)
    if function is None:
        known = rpc_names(worker)
        close = difflib.get_close_matches(method, known, n=1)
        remedy = f"did you mean {close[0]!r}? Known" if close else "known"
        raise InvalidRequestError(
            f"no worker method {method!r} is declared with @rpc; {remedy}: {', '.join(known)}",
            field="method",
            value=method,
        )
    return types.MethodType(function, worker)


def call_rpc(worker: object, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """Calls a declared method with arguments as they come off the wire: builtins, numpy arrays, `HostTensor`.

    Every `HostTensor` becomes a torch tensor. Then each argument is converted to its annotation (msgspec, strict). For
    `np.ndarray`, an array is passed as it is, and made of a tensor, a list or the bytes of int32; for `torch.Tensor`,
    a tensor is passed as it is, and made of an array. An argument without an annotation, or of `object`, is passed as
    it is. Raises `InvalidRequestError` for an unknown method and for arguments that do not fit, before the method runs;
    then whatever the method raises.
    """
    bound_method = find_rpc(worker, method)
    function = bound_method.__func__
    signature = _signature(function)
    try:
        bound = signature.bind(*to_torch(list(args)), **to_torch(dict(kwargs or {})))
    except TypeError as error:
        raise InvalidRequestError(
            f"wrong arguments for {method}{signature}: {error}", field="args", value=method
        ) from error
    for name, value in bound.arguments.items():
        kind = _annotation(function, name)
        if kind in (inspect.Parameter.empty, object):
            continue
        where = f"{method}({name})"
        match signature.parameters[name].kind:
            case inspect.Parameter.VAR_POSITIONAL:
                bound.arguments[name] = tuple(_convert(item, kind, where) for item in value)
            case inspect.Parameter.VAR_KEYWORD:
                bound.arguments[name] = {key: _convert(item, kind, where) for key, item in value.items()}
            case _:
                bound.arguments[name] = _convert(value, kind, where)
    return bound_method(*bound.args, **bound.kwargs)


# To look a function over costs more than to call it, so that is done once for each.


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The method's signature as its caller sees it: without the worker itself."""
    return inspect.signature(types.MethodType(function, object()))


@functools.cache
def _annotation(function: Callable[..., Any], name: str) -> Any:
    """The parameter's annotation as a type. One at a time: a return type imported for checkers alone does no harm."""
    annotation = _signature(function).parameters[name].annotation
    if not isinstance(annotation, str):
        return annotation
    holder = types.SimpleNamespace(__annotations__={name: annotation})
    inner = inspect.unwrap(function)
    try:
        return typing.get_type_hints(holder, globalns=inner.__globals__)[name]
    except NameError as error:
        raise InvalidRequestError(
            f"{inner.__qualname__} cannot be called: the annotation {annotation!r} of {name!r} "
            f"is unknown where it runs ({error}); import it outside TYPE_CHECKING",
            field="method",
            value=inner.__name__,
        ) from error


def _convert(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind, strict=True, dec_hook=_convert_extra)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        shown = repr(value)
        shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
        raise InvalidRequestError(f"{where}={shown}: {error}", field=where, value=shown) from error


def _convert_extra(kind: Any, value: Any) -> Any:
    """What msgspec knows nothing of: arrays and tensors."""
    wanted = typing.get_origin(kind) or kind
    if isinstance(value, wanted):
        return value
    torch = sys.modules.get("torch")  # who never loaded it has neither a tensor nor a wish for one
    if wanted is np.ndarray:
        return value.numpy() if torch is not None and isinstance(value, torch.Tensor) else _array_of(value)
    if torch is not None and wanted is torch.Tensor and isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    raise TypeError(f"expected {wanted.__qualname__}, got {type(value).__name__}")


def _array_of(value: Any) -> np.ndarray:
    """A numpy array of plain data, as `ringcore.protocol` has them: integers are int32."""
    if isinstance(value, bytes):
        return np.frombuffer(value, dtype=np.int32)
    array = np.asarray(value)
    if array.dtype.kind in "iu" or not array.size:
        small = array.astype(np.int32)
        if not np.array_equal(small, array):
            raise ValueError("an integer does not fit into 32 bits")
        return small
    if array.dtype.kind not in "fb":
        raise TypeError(f"expected an array of numbers, got {type(value).__name__}")
    return array
