"""Checks of one value, whose errors name the option, the value and the remedy."""

from __future__ import annotations

from ringcore.errors import ConfigError
from ringcore.params.field_checks import MAX_TIMEOUT_S, is_timeout

__all__ = ["bad_value", "check_count", "check_seconds"]


def bad_value(option: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{option}={value!r}: {remedy}", option=option, value=repr(value))


def check_count(name: str, value: object, low: int, high: int | None = None, or_else: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise bad_value(name, value, f"give an integer of at least {low}" + (f", or {or_else}" if or_else else ""))
    if high is not None and value > high:
        raise bad_value(name, value, f"give an integer of at most {high}")


def check_seconds(name: str, value: object) -> None:
    if not is_timeout(value) or not value:
        raise bad_value(name, value, f"give a positive number of seconds, at most {MAX_TIMEOUT_S:.0f}")
