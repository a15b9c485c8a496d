"""The wire form of errors that the engine sends to its clients, and the errors of calls that it refuses."""

from __future__ import annotations

import msgspec

from ringcore.errors import InvalidRequestError, RingcoreError, error_to_wire
from ringcore.protocol.requests import WireError

__all__ = ["callables_refused", "invalid_call", "wire_error", "wire_without_details"]

_MAX_ERROR_CHARS = 4 << 10


def wire_error(error: RingcoreError) -> WireError:
    return msgspec.convert(error_to_wire(error), WireError)


def wire_without_details(error: RingcoreError, failure: Exception) -> WireError:
    """The error without its details, which `failure` kept from being encoded."""
    text = error.message[:_MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()
    return WireError(type(error).__name__, f"{text} (its details cannot be sent: {failure})")


def callables_refused(name: str) -> InvalidRequestError:
    """The error for a function sent to an engine without `allow_callables`."""
    return InvalidRequestError(
        f"method={name}: this engine accepts no Python functions; construct it with allow_callables=True, or give the "
        "name of an @rpc method",
        field="method",
        value=name,
    )


def invalid_call(field: str, value: str, valid: list[str]) -> InvalidRequestError:
    return InvalidRequestError(f"{field}={value!r}: give one of {', '.join(valid)}", field=field, value=value)
