"""Checks of what comes with a prompt: each raises an `InvalidRequestError` that names field, value and remedy."""

from __future__ import annotations

import operator
from typing import Any

from ringcore.errors import InvalidRequestError
from ringcore.params.field_checks import bad_field

__all__ = ["checked_bool", "checked_int", "checked_integers", "checked_priority", "checked_string", "is_integer"]

_MAX_ID_BYTES = 256
_MAX_PRIORITY = 2**31 - 1


def checked_integers(field: str, values: Any) -> list[int]:
    """The values as plain ints; accepts numpy integers, rejects floats and bools."""
    if not isinstance(values, list | tuple):
        raise bad_field(field, type(values).__name__, "give a list of token ids")
    if set(map(type, values)) == {int}:  # the fast path, as for values from JSON
        return list(values)
    for position, value in enumerate(values):
        if not is_integer(value):
            raise InvalidRequestError(
                f"{field}: {value!r} at position {position} is a {type(value).__name__}; give integers",
                field=field,
                value=repr(value)[:80],
                position=position,
            )
    return [operator.index(value) for value in values]


def is_integer(value: Any) -> bool:
    if type(value) is int:
        return True
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def checked_string(field: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise bad_field(field, repr(value)[:80], "give a str that is not empty")
    try:
        length = len(value.encode())
    except UnicodeEncodeError:
        raise bad_field(field, repr(value)[:80], "it holds half of a surrogate pair; remove it") from None
    if length > _MAX_ID_BYTES:
        raise bad_field(field, repr(value)[:80], f"it has {length} bytes; give at most {_MAX_ID_BYTES}")
    return value


def checked_priority(value: Any) -> int:
    """None means the default, 0."""
    if value is None:
        return 0
    if not is_integer(value) or abs(operator.index(value)) > _MAX_PRIORITY:
        raise bad_field("priority", repr(value)[:80], f"give an integer from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")
    return operator.index(value)


def checked_int(field: str, value: Any, low: int, high: int) -> int:
    if not is_integer(value) or not low <= operator.index(value) <= high:
        raise bad_field(field, value, f"give an integer from {low} to {high}")
    return operator.index(value)


def checked_bool(field: str, value: Any, otherwise: bool) -> bool:
    """`otherwise` for None."""
    if value is None:
        return otherwise
    if not isinstance(value, bool):
        raise bad_field(field, value, "give True or False")
    return value
