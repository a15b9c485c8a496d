"""Regular expressions in xgrammar's GBNF, for plain text or for the inside of a JSON string.

xgrammar's own regex parser is not used: it misreads some character classes, and accepts invalid UTF-8.
"""

from __future__ import annotations

from ringcore.grammars.regular_expressions import Alt, Anchor, Chars, Node, Repeat, Seq

__all__ = ["in_json_string", "write_gbnf"]

_ESCAPED = (*range(0x20), ord('"'), ord("\\"))
_TWO_LETTERS = {0x08: "b", 0x09: "t", 0x0A: "n", 0x0C: "f", 0x0D: "r"}


def in_json_string(node: Node, *, is_counted: bool = False) -> Node:
    """Matches the raw text between a JSON string's quotes where `node` matches the decoded string.

    A character that JSON must escape has one spelling: the two-letter escape if it exists, else \\u00hh. Within a
    counted repetition ({2,5}) of a class, such characters are excluded: masks would take 0.1 s each. Raises ValueError
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
            raise AssertionError("anchors were removed")


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
    """The node in GBNF, parenthesized where necessary. Raises ValueError for \\p{...}."""
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
            raise AssertionError("anchors were removed")


def _write_repeat(inner: Node, low: int, high: int | None) -> str:
    """Writes * rather than {0,}, which makes filling a mask a thousand times slower."""
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
