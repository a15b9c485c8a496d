"""Executes one call in a worker: decodes the request, calls the method, encodes the value or the error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringcore.errors import InvalidRequestError
from ringcore.executor.callables import call_packed
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.value_codec import decode_request, encode_error, encode_value
from ringcore.executor.wire import CALL, CALLABLE, CallHead
from ringcore.worker.rpc import call_rpc

__all__ = ["Outcome", "failed", "perform_call", "prepare_call"]


class Outcome(NamedTuple):
    """The result of a call: the buffers of the encoded value, or of the encoded error."""

    is_error: bool
    parts: Sequence[Buffer]


def failed(error: BaseException, rank: int, method: str) -> Outcome:
    return Outcome(True, [encode_error(error, rank, method)])


def prepare_call(worker: Any, rank: int, head: CallHead, request: Sequence[Buffer]) -> Callable[[], Outcome | None]:
    """A decoded call, ready to be performed; it no longer needs the request's buffers.

    It returns the method's value, or the error of decoding, calling or encoding; None on success if this rank does not
    reply. `SystemExit`, `KeyboardInterrupt` and the like pass through: they concern the process, not the call.
    """
    try:
        method, args, kwargs = _checked_request(head, request)
    except Exception as error:
        outcome = failed(error, rank, head.method)
        return lambda: outcome
    must_reply = head.unique_reply_rank in (None, rank)

    def perform() -> Outcome | None:
        try:
            if isinstance(method, bytes):
                value = call_packed(worker, method, args, kwargs)
            else:
                value = call_rpc(worker, method, args, kwargs, head.by_engine)
            return Outcome(False, encode_value(value)) if must_reply else None
        except Exception as error:
            return failed(error, rank, head.method)

    return perform


def perform_call(worker: Any, rank: int, head: CallHead, request: Sequence[Buffer]) -> Outcome | None:
    """See `prepare_call`."""
    return prepare_call(worker, rank, head, request)()


def _checked_request(head: CallHead, request: Sequence[Buffer]) -> tuple[str | bytes, list[Any], dict[str, Any]]:
    """Decodes the request and checks it against the header: a packed function only for kind CALLABLE, else exactly the
    method of the header, by which the executor chose the thread."""
    method, args, kwargs = decode_request(request)
    is_consistent = head.kind == CALLABLE if isinstance(method, bytes) else head.kind == CALL and method == head.method
    if not is_consistent:
        found = "a function" if isinstance(method, bytes) else repr(method)
        raise InvalidRequestError(
            f"the call is of {head.method!r}, but its request asks for {found}", field="method", value=head.method
        )
    return method, args, kwargs
