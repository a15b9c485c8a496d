"""Regular expressions in xgrammar's GBNF, as they are or as they match within a string of JSON.

Its own reading of expressions is left aside: it takes some sets of characters for others, and lets bytes through that
are no UTF-8.
"""

from __future__ import annotations

from ringcore.regular_expressions import Alt, Anchor, Chars, Node, Repeat, Seq

__all__ = ["in_json_string", "write_gbnf"]

_TWO_LETTERS = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r"}


def in_json_string(node: Node) -> Node:
    """What matches the text of a JSON string between its quotes where `node` matches what the string says.

    A character that JSON has to escape is written in one way: with two letters where there are such, else \\u00hh.
    Raises ValueError for \\p{...}.
    """
    match node:
        case Chars():
            return _escaped(node)
        case Seq(parts):
            return Seq(tuple(map(in_json_string, parts)))
        case Alt(branches):
            return Alt(tuple(map(in_json_string, branches)))
        case Repeat(inner, low, high):
            return Repeat(in_json_string(inner), low, high)
        case Anchor():
            raise AssertionError("anchors are gone")


def _escaped(chars: Chars) -> Node:
    if chars.properties:
        raise ValueError(f"{chars.properties[0]} of a regular expression")
    points = [point for point in (*range(0x20), ord('"'), ord("\\")) if chars.has(point)]
    plain = chars.without((*range(0x20), ord('"'), ord("\\")))
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
            return f"({write_gbnf(inner)}){{{low},{'' if high is None else high}}}"
        case Anchor():
            raise AssertionError("anchors are gone")


def _write_chars(chars: Chars) -> str:
    if chars.properties:
        raise ValueError(f"{chars.properties[0]} of a regular expression")
    return f"[{''.join(f'{_point(low)}-{_point(high)}' for low, high in chars.ranges)}]"


def _point(point: int) -> str:
    return f"\\u{point:04x}" if point < 0x10000 else f"\\U{point:08x}"
