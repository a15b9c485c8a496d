"""Tables and figures for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["duration", "printable", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns, without trailing spaces."""
    cells = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def printable(text: str) -> str:
    """The text without control characters, which could write to the terminal what they like."""
    return "".join(character if character.isprintable() else "?" for character in text)


def duration(seconds: float) -> str:
    """ "42s", "12m30s", "5h02m", "3d04h"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"
