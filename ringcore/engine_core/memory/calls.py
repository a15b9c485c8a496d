"""Operations called by name, with unchecked arguments from a client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringcore.engine_core.memory.operations import Steps
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.rpc_call import EncodedCall, check_reply_rank
from ringcore.executor.value_codec import decode_request
from ringcore.protocol.messages import MemoryReport
from ringcore.protocol.operations import MemoryOperation, operation_of, wrong_arguments

__all__ = ["arguments_of", "by_rank", "decoded_operation"]


def decoded_operation(method: str, parts: Sequence[Buffer]) -> MemoryOperation:
    """The operation of a call by name. Raises `InvalidRequestError`."""
    return operation_of(method, *arguments_of(method, parts))


def by_rank(steps: Steps, call: EncodedCall, num_ranks: int) -> Steps:
    """As if it were a method of the workers: one value per rank, or that of the `unique_reply_rank`."""
    only = call.unique_reply_rank
    check_reply_rank(only, num_ranks)

    def values() -> Steps:
        report: MemoryReport = yield from steps
        ranks = report.ranks or [{} for _ in range(num_ranks)]
        return ranks if only is None else ranks[only]

    return values()


def arguments_of(method: str, parts: Sequence[Buffer]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call to the engine itself; without buffers, none. Raises `InvalidRequestError`."""
    try:
        _, args, kwargs = decode_request(parts) if parts else (method, [], {})
    except msgspec.DecodeError as error:
        raise wrong_arguments(method, str(error)) from error
    return args, kwargs
