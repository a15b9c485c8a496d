"""Checks of the fields of a `quantization_config`: every one is known, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from ringcore.checkpoint.metadata import Metadata

__all__ = ["checked_patterns", "refuse_others", "require"]

_MAX_PATTERNS, _MAX_PATTERN = 100_000, 500  # of a list, and characters of one


def refuse_others(config: Metadata, known: Collection[str]) -> None:
    """Raises `ModelLoadError` for a field that has a value and is none of `known`."""
    for field in config.values:
        if field not in known and field in config:
            raise config.error(
                field, f"is {config.get(field)!r}, which is not known here; quantize the model without it"
            )


def require(config: Metadata, field: str, known: tuple[Any, ...], remedy: str) -> Any:
    """The field's value, one of `known`. Raises `ModelLoadError`."""
    value = config.get(field)
    if not any(value is one or (value == one and type(value) is type(one)) for one in known):
        choices = ", ".join(repr(one) for one in known if one is not None)
        raise config.error(field, f"is {value!r}; known: {choices}; {remedy}")
    return value


def checked_patterns(config: Metadata, field: str) -> list[str]:
    """A list of names and "re:..." patterns; none where it is absent."""
    value = config.get(field)
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > _MAX_PATTERNS or not all(isinstance(one, str) for one in value):
        raise config.error(field, f"is {str(value)[:100]}, a list of names is needed")
    for pattern in value:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise config.error(field, f"has {pattern!r}, which is no regular expression: {error}") from error
        if not pattern or len(pattern) > _MAX_PATTERN:
            raise config.error(
                field, f"has {pattern[:100]!r}, of {len(pattern)} characters; 1 to {_MAX_PATTERN} are read"
            )
    return value
