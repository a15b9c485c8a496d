"""Writes regular expressions in the constructs on which all grammar libraries agree."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.grammars.regular_expressions.nodes import Alt, Anchor, Chars, Node, Range, Repeat, Seq

__all__ = ["write_regex"]


def write_regex(node: Node) -> str:
    """The expression, for a full match."""
    match node:
        case Chars():
            return _write_chars(node)
        case Seq(parts):
            return "".join(f"(?:{write_regex(part)})" if isinstance(part, Alt) else write_regex(part) for part in parts)
        case Alt(branches):
            return "|".join(map(write_regex, branches))
        case Repeat(inner, low, high):
            return _write_repeat(inner, low, high)
        case Anchor():
            raise AssertionError("anchors were removed")


def _write_repeat(inner: Node, low: int, high: int | None) -> str:
    text = write_regex(inner)
    if high == 0 or not text:
        return ""
    if not isinstance(inner, Chars):
        text = f"(?:{text})"
    if (low, high) == (1, 1):
        return text
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((low, high))
    return text + (short or (f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"))


def _write_chars(chars: Chars) -> str:
    if not chars.properties and len(chars.ranges) == 1 and chars.ranges[0][0] == chars.ranges[0][1]:
        return _point(chars.ranges[0][0])
    return f"[{'^' if chars.is_negated else ''}{''.join(chars.properties)}{_write_ranges(chars.ranges)}]"


def _write_ranges(ranges: Sequence[Range]) -> str:
    return "".join(_point(low) if low == high else f"{_point(low)}-{_point(high)}" for low, high in ranges)


def _point(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else f"\\u{{{point:x}}}"
