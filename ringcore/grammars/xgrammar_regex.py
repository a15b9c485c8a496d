"""Regular expressions in xgrammar's GBNF, as they are or as they match within a string of JSON.

Its own reading of expressions is left aside: it takes some sets of characters for others, and lets bytes through that
are no UTF-8.
"""

from __future__ import annotations

from ringcore.grammars.regular_expressions import Alt, Anchor, Chars, Node, Repeat, Seq

__all__ = ["in_json_string", "write_gbnf"]

_ESCAPED = (*range(0x20), ord('"'), ord("\\"))
_TWO_LETTERS = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r"}


def in_json_string(node: Node, *, is_counted: bool = False) -> Node:
    """What matches the text of a JSON string between its quotes where `node` matches what the string says.

    A character that JSON has to escape is written in one way: with two letters where there are such, else \\u00hh. As
    one of several characters that are counted ({2,5}) it is left out: masks would take 0.1 s each. Raises ValueError
    for \\p{...}.
    """
    match node:
        case Chars():
            return _escaped(node, is_counted)
        case Seq(parts):
            return Seq(tuple(in_json_string(part, is_counted=is_counted) for part in parts))
        case Alt(branches):
            return Alt(tuple(in_json_string(branch, is_counted=is_counted) for branch in branches))
        case Repeat(inner, low, high):
            is_counted = is_counted or max(low, high or 0) > 1
            return Repeat(in_json_string(inner, is_counted=is_counted), low, high)
        case Anchor():
            raise AssertionError("anchors are gone")


def _escaped(chars: Chars, is_counted: bool) -> Node:
    if chars.properties:
        raise ValueError(f"{chars.properties[0]} of a regular expression")
    points = [point for point in _ESCAPED if chars.has(point)]
    plain = chars.without(_ESCAPED)
    if plain.ranges and (is_counted or not points):
        return plain
    ways: list[Node] = [plain] if plain.ranges else []
    ways += [_text(f"\\{chr(point)}") for point in points if point >= 0x20]
    ways += [_text(f"\\{_TWO_LETTERS.get(point, f'u{point:04x}')}") for point in points if point < 0x20]
    return ways[0] if len(ways) == 1 else Alt(tuple(ways))


def _text(text: str) -> Node:
    return Seq(tuple(Chars(((ord(char), ord(char)),)) for char in text))


def write_gbnf(node: Node) -> str:
    """An expression of GBNF, in brackets where it needs them. Raises ValueError for \\p{...}."""
    match node:
        case Chars():
            return _write_chars(node)
        case Seq(parts):
            return " ".join(map(write_gbnf, parts)) or '""'
        case Alt(branches):
            return f"({' | '.join(map(write_gbnf, branches))})"
        case Repeat(inner, low, high):
            return _write_repeat(inner, low, high)
        case Anchor():
            raise AssertionError("anchors are gone")


def _write_repeat(inner: Node, low: int, high: int | None) -> str:
    """With * rather than {0,}, which takes a thousand times as long to fill a mask."""
    text = write_gbnf(inner) if isinstance(inner, Chars) else f"({write_gbnf(inner)})"
    if (low, high) == (0, 1):
        return f"{text}?"
    if high is not None:
        return f"{text}{{{low},{high}}}"
    return {0: f"{text}*", 1: f"{text}+"}.get(low, f"{text}{{{low},{low}}} {text}*")


def _write_chars(chars: Chars) -> str:
    if chars.properties:
        raise ValueError(f"{chars.properties[0]} of a regular expression")
    return f"[{''.join(f'{_point(low)}-{_point(high)}' for low, high in chars.ranges)}]"


def _point(point: int) -> str:
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
