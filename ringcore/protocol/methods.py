"""Descriptions of the methods that can be called by name, and the errors for those that cannot."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from ringcore.errors import InvalidRequestError
from ringcore.protocol.scopes import Scope

__all__ = ["DeclaredScope", "RpcMethod", "engine_only", "signature_text", "unknown_method"]

DeclaredScope = Scope | Literal["engine"]  # "engine": the engine alone calls it

_INSTEAD = {
    "shutdown": "close its owner (LLM, AsyncEngine, EngineCoreClient or EngineCore)",
    "execute_model": "give requests, e.g. by generate()",
    "load_model": "call reload_weights(path)",
    "determine_available_memory": "call memory",
    "prepare_memory": "call one of sleep, wake_up",
    "commit_memory": "call one of sleep, wake_up",
    "roll_back_memory": "call one of sleep, wake_up",
    "compile_grammar": "give requests with structured_outputs",
}


class RpcMethod(msgspec.Struct, frozen=True):
    """A method of the engine itself or of every worker.

    scope: that an admin client's key needs. read_only: it changes nothing. signature: without `self`, e.g.
    "(by: int = 1) -> int". summary: the first line of its docstring.
    """

    name: str
    target: Literal["engine", "workers"]
    scope: DeclaredScope
    read_only: bool
    signature: str
    summary: str

    @classmethod
    def of(
        cls, method: Callable[..., Any], target: Literal["engine", "workers"], scope: DeclaredScope, read_only: bool
    ) -> RpcMethod:
        """method: a function whose first parameter is `self`."""
        lines = (inspect.getdoc(method) or "").splitlines()
        signature = inspect.signature(types.MethodType(method, object()))
        text = signature_text(signature, signature.return_annotation)
        return cls(method.__name__, target, scope, read_only, text, lines[0] if lines else "")


def signature_text(signature: inspect.Signature, returns: Any) -> str:
    """The signature with its annotations as in the source."""
    parameters = [p.replace(annotation=_unquoted(p.annotation)) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=_unquoted(returns)))


class _Unquoted(str):
    __slots__ = ()
    __repr__ = str.__str__


def _unquoted(annotation: Any) -> Any:
    return _Unquoted(annotation) if isinstance(annotation, str) else annotation


def unknown_method(name: str, known: Iterable[str]) -> InvalidRequestError:
    """The error for a name that no worker method has. known: those that can be called."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    remedy = f"did you mean {close[0]!r}? Known" if close else "known"
    return InvalidRequestError(
        f"no worker method {name!r} is declared with @rpc; {remedy}: {', '.join(names)}", field="method", value=name
    )


def engine_only(name: str) -> InvalidRequestError:
    """The error for a client's call of a method that only the engine may call."""
    instead = f"; {_INSTEAD[name]} instead" if name in _INSTEAD else ""
    return InvalidRequestError(
        f"method={name!r}: only the engine itself calls it on its workers{instead}", field="method", value=name
    )
