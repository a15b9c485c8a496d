"""Tables and figures for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["age", "count", "printable", "table"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with aligned columns, without trailing spaces."""
    cells = [list(header), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def printable(text: str) -> str:
    """The text without control characters, which could write to the terminal what they like."""
    return "".join(character if character.isprintable() else "?" for character in text)


def age(seconds: float) -> str:
    """Of a request or an engine: "0.4s", "42s", "12m30s", "5h02m", "3d04h"."""
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02}h"


def count(number: float) -> str:
    """In at most 6 characters: 0.5, 12, 1,234, 123k, 1.23M."""
    if number < 10 and number != int(number):
        return f"{number:.1f}"
    if number < 99_999.5:
        return f"{number:,.0f}"
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * unit:
            digits = number / unit
            return f"{digits:.2f}{name}" if digits < 9.995 else f"{digits:.0f}{name}"
    return f"{number:,.0f}"
