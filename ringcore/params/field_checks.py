"""Validators of request parameters. For any value, their error is an `InvalidRequestError` that names the field, shows
the shortened value, and gives the remedy."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Sequence
from typing import Any

from ringcore.errors import InvalidRequestError

__all__ = [
    "MAX_COUNT",
    "MAX_TIMEOUT_S",
    "bad_field",
    "check_int",
    "check_list",
    "check_number",
    "check_plain_data",
    "check_text",
    "check_timeout",
    "is_timeout",
]

MAX_COUNT = 2**31 - 1  # the workers' columns are int32
MAX_TIMEOUT_S = 1_000_000.0  # 11 days; poll() takes 24
_MAX_SHOWN_CHARS = 80
_SENDABLE_INT = 2**63  # msgpack's limit of the absolute value
_NUMBERS = (int, float)  # a union of types would be made anew by each check

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = _MAX_SHOWN_CHARS


def bad_field(field: str, value: object, remedy: str) -> InvalidRequestError:
    """The error for a field of a request; `details["value"]` is the value, or a short form of it."""
    return InvalidRequestError(f"{field}={_shown(value)}: {remedy}", field=field, value=_portable(value))


def _shown(value: object) -> str:
    try:
        text = _short.repr(value)
    except Exception:  # a huge integer has no decimal form; a user's __repr__ may raise
        text = f"a {type(value).__name__}"
    return text.encode(errors="replace").decode()


def _portable(value: object) -> object:
    match value:
        case None | bool() | float():
            return value
        case int() if abs(value) < _SENDABLE_INT:
            return value
        case str() if len(value) <= _MAX_SHOWN_CHARS:
            return value.encode(errors="replace").decode()
    return _shown(value)


def check_int(name: str, value: object, low: int, high: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise bad_field(name, value, f"give an integer from {low} to {high}; {remedy}")


def check_number(name: str, value: object, low: float, high: float, remedy: str) -> None:
    """A finite number from `low` to `high`."""
    if not isinstance(value, _NUMBERS) or isinstance(value, bool) or not low <= value <= high:  # NaN too
        raise bad_field(name, value, f"give a number from {low:g} to {high:g}; {remedy}")


def is_timeout(value: object, max_s: float = MAX_TIMEOUT_S) -> bool:
    """Whether it is a valid timeout in seconds, including 0."""
    return isinstance(value, _NUMBERS) and not isinstance(value, bool) and 0 <= value <= max_s  # false for NaN


def check_timeout(name: str, timeout: object, max_s: float = MAX_TIMEOUT_S, *, or_none: bool = True) -> None:
    """A number of seconds, or None for no deadline."""
    if timeout is None and or_none:
        return
    if not is_timeout(timeout, max_s):
        never = ", or None to wait without a deadline" if or_none else ""
        raise bad_field(name, timeout, f"give seconds, from 0 to {max_s:.0f}{never}")


def check_list(name: str, value: object, max_length: int, remedy: str) -> Sequence[Any]:
    """A list (or tuple) of one to `max_length` items."""
    if not isinstance(value, list | tuple):
        raise bad_field(name, value, f"give a list; {remedy}")
    if not 1 <= len(value) <= max_length:
        raise bad_field(name, len(value), f"give a list of 1 to {max_length}; {remedy}")
    return value


def check_text(name: str, value: object, max_chars: int, what: str) -> None:
    """A string of 1 to `max_chars` characters without lone surrogates."""
    if not isinstance(value, str) or not value or len(value) > max_chars:
        raise bad_field(name, value, f"{what} has 1 to {max_chars} characters")
    if not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise bad_field(name, value, "a surrogate stands for half a character; remove it")


def check_plain_data(name: str, value: object, *, max_size: int, max_depth: int, finite: bool = True) -> None:
    """A dict of JSON data: None, bools, numbers, strings, lists and dicts with string keys.

    max_size: of the characters of all strings plus the number of values. max_depth: of nested lists and dicts.
    """
    if not isinstance(value, dict):
        raise bad_field(name, value, "give a dict with strings as keys")
    left, level = max_size, [value]
    for _ in range(max_depth):
        inner: list[Any] = []
        for box in level:
            items = list(box.values()) if isinstance(box, dict) else box
            left -= len(items) + sum(len(text) for text in (*items, *box) if isinstance(text, str))
            if left < 0:
                raise bad_field(name, value, f"it holds more than {max_size} characters and values; make it smaller")
            if isinstance(box, dict) and not all(isinstance(key, str) for key in box):
                raise bad_field(name, value, "the keys of its dicts have to be strings")
            for item in items:
                if type(item) in (list, dict):
                    inner.append(item)
                elif not _is_plain(item, finite):
                    raise bad_field(
                        name,
                        item,
                        "it holds this; give None, bools, numbers of 64 bits, strings, lists and dicts alone",
                    )
        if not inner:
            return
        level = inner
    raise bad_field(name, value, f"lists and dicts are nested more than {max_depth} deep; make it flatter")


def _is_plain(item: object, finite: bool) -> bool:
    match item:
        case None | bool():
            return True
        case int():
            return -_SENDABLE_INT <= item < _SENDABLE_INT
        case float():
            return not finite or math.isfinite(item)
        case str():
            return item.isascii() or not any("\ud800" <= c <= "\udfff" for c in item)
    return False
