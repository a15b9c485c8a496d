"""What a call returned, for a terminal and for machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ringcore.cli.tables import printable, table

__all__ = ["as_json", "in_words"]

_MAX_CHARS = 60  # of a value in a table


def as_json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def in_words(values: Mapping[int | None, Any]) -> list[str]:
    """Lines for the value of each rank; rank None: the engine's own.

    Objects are a table with a column per rank; texts of several lines follow their rank; all else is a line per rank.
    """
    if all(value is None for value in values.values()):
        ranks = [rank for rank in values if rank is not None]
        return [f"done on {len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'}" if ranks else "done"]
    if all(isinstance(value, dict) and value for value in values.values()):
        return _fields(values)
    if None in values and isinstance(values[None], list) and all(isinstance(one, dict) for one in values[None]):
        return [_line(one) for one in values[None]]
    lines = []
    for rank, value in values.items():
        head = "" if rank is None else f"rank {rank}: "
        is_text = isinstance(value, str) and "\n" in value
        lines += [head.rstrip(), *map(printable, value.splitlines())] if is_text else [head + _line(value)]
    return lines


def _fields(values: Mapping[int | None, Any]) -> list[str]:
    """A row per field, those of nested objects with dots."""
    flat = {rank: dict(_flattened(value)) for rank, value in values.items()}
    names = dict.fromkeys(name for fields in flat.values() for name in fields)
    header = ["", *("value" if rank is None else f"rank {rank}" for rank in flat)]
    return table(header, [[name, *(_cell(fields, name) for fields in flat.values())] for name in names])


def _flattened(value: Mapping[Any, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, one in value.items():
        path = f"{prefix}{name}"
        pairs += _flattened(one, f"{path}.") if isinstance(one, dict) and one else [(path, one)]
    return pairs


def _cell(fields: Mapping[str, Any], name: str) -> str:
    text = _line(fields[name]) if name in fields else "-"
    return text if len(text) <= _MAX_CHARS else f"{text[: _MAX_CHARS - 3]}..."


def _line(value: Any) -> str:
    return printable(value) if isinstance(value, str) else as_json(value)


def _plain(value: Any) -> Any:
    """Converts arrays and tensors to nested lists, a complex number to [real, imag]."""
    return [value.real, value.imag] if isinstance(value, complex) else value.tolist()
