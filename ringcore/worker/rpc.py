"""The worker's RPC methods: their declaration, lookup and dispatch.

A method can be called only if it is declared with `@rpc`; its arguments are checked against its annotations. Only the
engine may call a method that is declared with `@rpc(scope="engine")`. This module does not import torch, so that
processes without a device can list the methods.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import msgspec
import numpy as np

from ringcore.errors import InvalidRequestError
from ringcore.protocol.host_tensor import to_torch
from ringcore.protocol.methods import DeclaredScope, RpcMethod, engine_only, unknown_method
from ringcore.protocol.scopes import SCOPES

__all__ = ["call_rpc", "find_rpc", "rpc", "rpc_methods"]

_Method = TypeVar("_Method", bound=Callable[..., Any])
_DECLARATION = "__ringcore_rpc__"  # a declared function has this attribute


class _Declaration(NamedTuple):
    scope: DeclaredScope
    read_only: bool


@overload
def rpc(method: _Method) -> _Method: ...


@overload
def rpc(*, read_only: bool = False, scope: DeclaredScope | None = None) -> Callable[[_Method], _Method]: ...


def rpc(method: Any = None, *, read_only: bool = False, scope: DeclaredScope | None = None) -> Any:
    """Declares that a worker's method may be called by name: `@rpc`, or `@rpc(read_only=True)`.

    A read-only method uses nothing that a step changes: the worker's side thread may execute it while a step runs.

    scope: the scope that an admin client's key needs: "read", "call" or "lifecycle" (see `ringcore.protocol.scopes`);
    by default "read" for a read-only method, else "call". "engine": only the engine may call it, and every call from
    outside is refused. Overriding such a method in a subclass or extension does not change its scope.

    Raises TypeError for another scope and for anything but a public function.
    """
    declaration = _Declaration(scope or ("read" if read_only else "call"), read_only)
    if declaration.scope not in (*SCOPES, "engine"):
        raise TypeError(f"@rpc(scope={scope!r}): give one of {', '.join(SCOPES)}, engine")

    def declare(function: _Method) -> _Method:
        is_method = inspect.isfunction(function) and inspect.signature(function).parameters
        if not is_method or function.__name__.startswith("_"):
            raise TypeError(f"@rpc declares a public method, not {function!r}; put it below other decorators")
        vars(function)[_DECLARATION] = declaration
        return function

    return declare if method is None else declare(method)


def rpc_methods(worker: object) -> dict[str, RpcMethod]:
    """The declared methods, including those of scope "engine", sorted by name."""
    names = sorted({name for cls in type(worker).__mro__ for name in vars(cls)})
    declared = {name: found for name in names if (found := _declared(worker, name)) is not None}
    return {name: RpcMethod.of(function, "workers", *kind) for name, (function, kind) in declared.items()}


def _declared(worker: object, name: str) -> tuple[Callable[..., Any], _Declaration] | None:
    """The declared function of this name. The first class in the method resolution order that has the name decides,
    except that a method of scope "engine" in any class keeps that scope."""
    found = [vars(cls)[name] for cls in type(worker).__mro__ if name in vars(cls)]
    kinds = [vars(one).get(_DECLARATION) if inspect.isfunction(one) else None for one in found]
    if not found or kinds[0] is None:
        return None
    is_engines = any(kind is not None and kind.scope == "engine" for kind in kinds)
    return found[0], kinds[0]._replace(scope="engine") if is_engines else kinds[0]


def find_rpc(worker: object, method: str, by_engine: bool = False) -> types.MethodType:
    """The declared method, bound. Raises `InvalidRequestError` for an undeclared name, listing the declared ones, and
    for a method of scope "engine" unless `by_engine`."""
    found = _declared(worker, method)
    if found is None:
        raise unknown_method(method, (one.name for one in rpc_methods(worker).values() if one.scope != "engine"))
    function, kind = found
    if kind.scope == "engine" and not by_engine:
        raise engine_only(method)
    return types.MethodType(function, worker)


def call_rpc(
    worker: object,
    method: str,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    by_engine: bool = False,
) -> Any:
    """Calls a declared method with arguments from the wire: builtins, numpy arrays, `HostTensor`.

    by_engine: whether the engine makes the call.

    Every `HostTensor` becomes a torch tensor. Then each argument is converted to its annotation (msgspec, strict). For
    `np.ndarray`, an array is passed unchanged, and a tensor, a list or the bytes of int32 are converted; for
    `torch.Tensor`, a tensor is passed unchanged, and an array is converted. An argument without an annotation, or of
    `object`, is passed unchanged. Raises `InvalidRequestError` as `find_rpc` does and for arguments that do not fit,
    before the method runs; afterwards whatever the method raises.
    """
    bound_method = find_rpc(worker, method, by_engine)
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


# Inspecting a signature costs more than the call, so the results are cached per function.


@functools.cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """The method's signature without `self`."""
    return inspect.signature(types.MethodType(function, object()))


@functools.cache
def _annotation(function: Callable[..., Any], name: str) -> Any:
    """The parameter's annotation as a type. Resolved one by one: a return type under TYPE_CHECKING does no harm."""
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
    """Converts to the types that msgspec does not support: arrays and tensors."""
    wanted = typing.get_origin(kind) or kind
    if isinstance(value, wanted):
        return value
    torch = sys.modules.get("torch")  # not imported: no argument and no annotation can be a tensor
    if wanted is np.ndarray:
        return value.numpy() if torch is not None and isinstance(value, torch.Tensor) else _array_of(value)
    if torch is not None and wanted is torch.Tensor and isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    raise TypeError(f"expected {wanted.__qualname__}, got {type(value).__name__}")


def _array_of(value: Any) -> np.ndarray:
    """A numpy array of plain data; integers are int32, as in `ringcore.protocol`."""
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
