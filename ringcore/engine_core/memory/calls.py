"""Operations called by name, with unchecked arguments from a client."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ringcore.engine_core.memory.control import MemoryControl
from ringcore.engine_core.memory.methods import OPERATIONS
from ringcore.engine_core.memory.operations import Steps
from ringcore.errors import InvalidRequestError
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.rpc_call import EncodedCall, check_reply_rank
from ringcore.executor.value_codec import decode_request
from ringcore.protocol.messages import MemoryReport
from ringcore.protocol.wire_errors import invalid_call

__all__ = ["arguments_of", "steps_by_rank", "steps_of", "wrong_arguments"]


def steps_of(control: MemoryControl, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Steps:
    """One of `OPERATIONS`. Raises `InvalidRequestError` for another name, and for invalid arguments."""
    if name not in OPERATIONS:
        raise invalid_call("method", name, list(OPERATIONS))
    method = vars(MemoryControl)[name]
    try:
        inspect.signature(method).bind(control, *args, **kwargs)
    except TypeError as error:
        raise wrong_arguments(name, error) from error
    steps: Steps = method(control, *args, **kwargs)
    return steps


def steps_by_rank(control: MemoryControl, call: EncodedCall, num_ranks: int) -> Steps:
    """As if it were a method of the workers: one value per rank, or that of the `unique_reply_rank`."""
    only = call.unique_reply_rank
    check_reply_rank(only, num_ranks)
    steps = steps_of(control, call.method, *arguments_of(call.method, call.parts))

    def by_rank() -> Steps:
        report: MemoryReport = yield from steps
        values = report.ranks or [{} for _ in range(num_ranks)]
        return values if only is None else values[only]

    return by_rank()


def arguments_of(method: str, parts: Sequence[Buffer]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call to the engine itself; without buffers, none. Raises `InvalidRequestError`."""
    try:
        _, args, kwargs = decode_request(parts) if parts else (method, [], {})
    except msgspec.DecodeError as error:
        raise wrong_arguments(method, error) from error
    return args, kwargs


def wrong_arguments(method: str, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"{method}: its arguments are wrong: {error}", field="args", value=method)
