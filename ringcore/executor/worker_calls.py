"""Executes one call in the worker: decodes the request, calls the method, encodes the value or the error."""

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
    """Decodes a call into a function that performs it; the request's buffers may be released afterwards.

    The function returns the value or the error of decoding, call or encoding; None on success if this rank does not
    reply. `SystemExit`, `KeyboardInterrupt` and other non-`Exception`s propagate: they end the process, not the call.
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
    """Decodes and performs a call: see `prepare_call`."""
    return prepare_call(worker, rank, head, request)()


def _checked_request(head: CallHead, request: Sequence[Buffer]) -> tuple[str | bytes, list[Any], dict[str, Any]]:
    """The decoded request, checked against the envelope: a packed function only in a CALLABLE, and a method only under
    the name in the envelope, by which the control thread or the main thread was chosen."""
    method, args, kwargs = decode_request(request)
    is_as_said = head.kind == CALLABLE if isinstance(method, bytes) else head.kind == CALL and method == head.method
    if not is_as_said:
        found = "a function" if isinstance(method, bytes) else repr(method)
        raise InvalidRequestError(
            f"the call is of {head.method!r}, but its request asks for {found}", field="method", value=head.method
        )
    return method, args, kwargs
