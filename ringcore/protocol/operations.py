"""Sleep, wake-up and weight updates as values: a tagged union, checked wherever one arrives.

An operation takes several iterations of the engine's loop. It can also be called by name, like an `@rpc` method of the
workers (`collective_rpc("sleep", (1,))`): the names, and their arguments, are those of the union.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec

from ringcore.errors import InvalidRequestError
from ringcore.protocol.wire_errors import invalid_call

__all__ = [
    "OPERATIONS",
    "FinishWeightUpdate",
    "MemoryOperation",
    "MemoryTag",
    "ReloadWeights",
    "Sleep",
    "SleepMode",
    "StartWeightUpdate",
    "UpdateWeights",
    "WakeUp",
    "checked_operation",
    "operation_name",
    "operation_of",
    "wrong_arguments",
]

SleepMode = Literal["abort", "wait", "keep"]  # requests are aborted, finished first, or preempted and recomputed later
MemoryTag = Literal["weights", "kv_cache"]
MemoryTags = Annotated[list[MemoryTag], msgspec.Meta(min_length=1)]
PathName = Annotated[str, msgspec.Meta(min_length=1)]


class Sleep(msgspec.Struct, frozen=True, tag="sleep", forbid_unknown_fields=True):
    level: Literal[0, 1, 2] = 1
    mode: SleepMode = "abort"


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up", forbid_unknown_fields=True):
    tags: MemoryTags | None = None


class StartWeightUpdate(msgspec.Struct, frozen=True, tag="start_weight_update", forbid_unknown_fields=True):
    mode: SleepMode = "keep"


class UpdateWeights(msgspec.Struct, frozen=True, tag="update_weights", forbid_unknown_fields=True):
    source: dict[str, Any]  # see `Worker.update_weights`, which checks it


class FinishWeightUpdate(msgspec.Struct, frozen=True, tag="finish_weight_update", forbid_unknown_fields=True):
    pass


class ReloadWeights(msgspec.Struct, frozen=True, tag="reload_weights", forbid_unknown_fields=True):
    path: PathName
    mode: SleepMode = "keep"


MemoryOperation = Sleep | WakeUp | StartWeightUpdate | UpdateWeights | FinishWeightUpdate | ReloadWeights
T = TypeVar("T", bound=MemoryOperation)

OPERATIONS: Mapping[str, type[MemoryOperation]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(MemoryOperation)
}

_REMEDIES = {  # by field
    "level": "give 0 (no steps), 1 (weights to host memory, KV cache discarded) or 2 (both discarded)",
    "mode": f"give one of {', '.join(map(repr, get_args(SleepMode)))}",
    "tags": f"give a list with one or both of {', '.join(map(repr, get_args(MemoryTag)))}, or None for both",
    "source": "give a dict with the kind of the source, as ringcore.weights.weight_source makes it",
    "path": "give a folder with safetensors files, or one such file",
}


def operation_name(operation: MemoryOperation) -> str:
    return str(operation.__struct_config__.tag)


def operation_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> MemoryOperation:
    """The operation that is called by name. Raises `InvalidRequestError` for another name and for invalid arguments."""
    if name not in OPERATIONS:
        raise invalid_call("method", name, list(OPERATIONS))
    kind = OPERATIONS[name]
    fields = kind.__struct_fields__
    if len(args) > len(fields):
        raise wrong_arguments(name, f"{len(args)} are given, it takes {', '.join(fields) or 'none'}")
    given = dict(zip(fields, args, strict=False))
    if twice := sorted(given.keys() & kwargs.keys()):
        raise wrong_arguments(name, f"{', '.join(twice)} is given twice")
    return _converted(kind, given | dict(kwargs))


def checked_operation(operation: T) -> T:
    """The operation, its fields checked: a constructor does not. Raises `InvalidRequestError`."""
    return _converted(type(operation), msgspec.structs.asdict(operation))


def _converted(kind: type[T], fields: Mapping[str, Any]) -> T:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        found = re.search(r"`\$\.(\w+)", str(error))
        if found is None:  # a missing field, or one too many
            raise wrong_arguments(str(kind.__struct_config__.tag), str(error)) from error
        field = found[1]
        value = repr(fields[field])
        raise InvalidRequestError(f"{field}={value}: {_REMEDIES[field]}", field=field, value=value) from error


def wrong_arguments(method: str, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{method}: its arguments are wrong: {why}", field="args", value=method)
