"""Numbers and foreign texts as the views show them: short, of a known width, and harmless to a terminal."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from ringcore.cli.tables import age, count

__all__ = ["UNKNOWN", "bar", "duration", "plain", "rate", "share", "size", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
UNKNOWN = "-"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def plain(text: str, width: int | None = None) -> str:
    """Untrusted text, without what moves a cursor, changes colours or the direction of writing; cut to
    `width` cells."""
    shown = "".join(one if one.isprintable() and not unicodedata.combining(one) else _REPLACEMENT for one in text)
    if width is None or cell_len(shown) <= width:
        return shown
    return set_cell_size(shown, max(0, width - 1)).rstrip() + "…" if width else ""


def rate(number: float | None) -> str:
    """Per second; a dash where it is not known."""
    return UNKNOWN if number is None else count(number)


def share(part: float | None) -> str:
    """Percent."""
    return UNKNOWN if part is None else f"{100 * part:.0f}%"


def duration(seconds: float) -> str:
    """Of a step: 850 ns, 43.0 µs, 5.12 ms, 2.30 s."""
    for unit, name in ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s")):
        number = seconds / unit
        if number < 999.5:
            digits = 0 if name == "ns" else 2 if number < 9.995 else 1 if number < 99.95 else 0
            return f"{number:.{digits}f} {name}"
    return age(seconds)


def size(num_bytes: float | None) -> str:
    """1.23 GiB, 12.3 GiB, 123 MiB."""
    if num_bytes is None:
        return UNKNOWN
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= 0.9995 * unit:
            number = num_bytes / unit
            return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {name}"
    return f"{num_bytes:.0f} B"


def bar(part: float, width: int) -> str:
    """A horizontal bar over `part` of `width` cells, filled up with spaces."""
    eighths = round(min(1.0, max(0.0, part)) * width * 8)
    if part > 0:
        eighths = max(eighths, 1)  # a little is not nothing
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_EIGHTHS[rest] if rest else "")).ljust(width)


def sparkline(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """`height` lines, the upper one first, of the last `width` values, the newest at the right."""
    shown = list(values)[-width:] if width > 0 else []
    highest = max(shown, default=0.0)
    levels = [0 if value <= 0 else max(1, round(8 * height * value / highest)) for value in shown]
    lines = []
    for row in reversed(range(height)):
        filled = [min(8, max(0, level - 8 * row)) for level in levels]
        lines.append("".join(_BARS[eighths - 1] if eighths else " " for eighths in filled).rjust(width))
    return lines
