"""An error is raised again as itself on the other side of a process boundary."""

from __future__ import annotations

import copy

import msgspec
import pytest

from ringcore import errors


@pytest.mark.parametrize(
    "name", [name for name in errors.__all__ if name.endswith("Error") and name != "RingcoreError"]
)
def test_each_type_survives_the_wire_and_a_copy(name):
    error = getattr(errors, name)("went wrong", rank=3, last_log=["a", "b"])
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(errors.error_to_wire(error)))
    for again in (errors.error_from_wire(wire), copy.copy(error)):
        assert type(again) is type(error)
        assert (again.message, again.details) == ("went wrong", {"rank": 3, "last_log": ["a", "b"]})


def test_a_foreign_error_keeps_its_name():
    again = errors.error_from_wire(errors.error_to_wire(ZeroDivisionError("by zero")))
    assert type(again) is errors.RingcoreError
    assert str(again) == "ZeroDivisionError: by zero"


def test_the_builtin_bases():
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.InvalidRequestError, ValueError)
    assert issubclass(errors.UnknownOptionError, TypeError)
    assert issubclass(errors.RpcTimeoutError, TimeoutError)
    assert issubclass(errors.PermissionDeniedError, PermissionError)
