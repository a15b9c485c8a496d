"""The methods that clients may call by name: the engine's own, its operations, and the workers' `@rpc` methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ringcore.engine_core.admin.operator_calls import OPERATOR_CALLS, OperatorCalls
from ringcore.engine_core.memory.methods import MemoryMethods
from ringcore.errors import InvalidRequestError
from ringcore.protocol.methods import RpcMethod, engine_only, signature_text, unknown_method
from ringcore.protocol.operations import OPERATIONS, MemoryOperation
from ringcore.protocol.scopes import Scope
from ringcore.protocol.wire_errors import invalid_call

__all__ = ["ENGINE_CALLS", "PublicMethods", "engine_method"]

# The methods of `EngineCore` that can be called by name and return at once; the scope that each needs.
ENGINE_CALLS: Mapping[str, Scope] = {
    "pause": "lifecycle",
    "resume": "lifecycle",
    "reset_prefix_cache": "call",
    "stats": "read",
    "step_metrics": "read",
    "health": "read",
    "is_sleeping": "read",
    "methods": "read",
}


def engine_method(name: str, engine: object, operator_calls: object) -> Callable[..., Any]:
    """The method of these two that a call to the engine itself names. Raises `InvalidRequestError` for another name."""
    if name not in ENGINE_CALLS and name not in OPERATOR_CALLS:
        raise invalid_call("method", name, sorted([*ENGINE_CALLS, *OPERATOR_CALLS, *OPERATIONS]))
    method: Callable[..., Any] = getattr(engine if name in ENGINE_CALLS else operator_calls, name)
    return method


class PublicMethods:
    """The method table of one engine.

    engine: its class, which has the `ENGINE_CALLS`; `OperatorCalls` has the others. of_workers: returns the methods
    that the current workers declare.
    """

    def __init__(self, engine: type[Any], of_workers: Callable[[], Mapping[str, RpcMethod]]) -> None:
        self._of_workers = of_workers
        self._operations = {name: _operation(name, kind) for name, kind in OPERATIONS.items()}
        self._of_engine = dict(self._operations)
        for holder, calls in ((engine, ENGINE_CALLS), (OperatorCalls, OPERATOR_CALLS)):
            for name, scope in calls.items():
                self._of_engine[name] = RpcMethod.of(getattr(holder, name), "engine", scope, scope == "read")

    def find(self, target: str, name: str) -> RpcMethod:
        """The method that a client's call names. target: "engine", or "workers", through which operations can be called
        too. Raises `InvalidRequestError` for an unknown method and for one that only the engine may call."""
        match target:
            case "engine":
                if name not in self._of_engine:
                    raise invalid_call("method", name, sorted(self._of_engine))
                return self._of_engine[name]
            case "workers":
                return self._find_of_workers(name)
        raise invalid_call("target", target, ["engine", "workers"])

    def _find_of_workers(self, name: str) -> RpcMethod:
        found = self._operations.get(name) or self._of_workers().get(name)
        if found is None and name in self._of_engine:
            raise InvalidRequestError(
                f"method={name!r}: it is a method of the engine, not of its workers; call it by {name}(), "
                f"call_engine({name!r}) or 'ringcore rpc --engine'",
                field="method",
                value=name,
            )
        if found is None:
            raise unknown_method(name, [*self._operations, *(one.name for one in self._of_public_workers())])
        if found.scope == "engine":
            raise engine_only(name)
        return found

    def _of_public_workers(self) -> list[RpcMethod]:
        methods = self._of_workers().values()
        return [one for one in methods if one.scope != "engine" and one.name not in self._operations]

    def listing(self) -> list[RpcMethod]:
        """Every method that `find` accepts, the engine's first."""
        return [*(self._of_engine[name] for name in sorted(self._of_engine)), *self._of_public_workers()]


def _operation(name: str, kind: type[MemoryOperation]) -> RpcMethod:
    """The method as called by name: with the fields of the operation, which has no timeout."""
    described = RpcMethod.of(getattr(MemoryMethods, name), "engine", "lifecycle", False)
    signature = inspect.signature(kind)
    fields = [p.replace(annotation=kind.__annotations__[p.name]) for p in signature.parameters.values()]
    text = signature_text(signature.replace(parameters=fields), "MemoryReport")
    return msgspec.structs.replace(described, signature=text)
