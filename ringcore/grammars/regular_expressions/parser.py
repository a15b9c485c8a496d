"""Parses a regular expression in the syntax of Python's `re` or of ECMA-262 into a syntax tree."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from typing import Literal

from ringcore.grammars.regular_expressions.nodes import (
    ANY,
    LAST,
    SURROGATES,
    Alt,
    Anchor,
    Chars,
    Node,
    Range,
    Repeat,
    Seq,
    chars_of,
)

__all__ = ["Dialect", "parse"]

Dialect = Literal["python", "ecma"]

MAX_NESTING = 64  # of groups

_DIGITS = Chars.of([(ord("0"), ord("9"))])
_WORD = Chars.of([(ord("a"), ord("z")), (ord("A"), ord("Z")), *_DIGITS.ranges, (ord("_"), ord("_"))])
_SPACES: dict[Dialect, Chars] = {
    "python": chars_of(" \t\n\r\f\v"),
    "ecma": Chars.of([*chars_of(" \t\n\r\f\v\xa0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff").ranges, (0x2000, 0x200A)]),
}
_DOT: dict[Dialect, Chars] = {
    "python": chars_of("\n").complement(),
    "ecma": chars_of("\n\r\u2028\u2029").complement(),
}
_CONTROLS = {"f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_QUANTIFIER = re.compile(r"[*+?]|\{(?:(\d+)(,(\d*))?|,(\d*))\}", re.ASCII)
_REFUSED_GROUPS = {
    "(?=": "lookahead",
    "(?!": "lookahead",
    "(?<=": "lookbehind",
    "(?<!": "lookbehind",
    "(?P=": "a back-reference",
    "(?>": "an atomic group",
    "(?(": "a conditional group",
}
_NAMED = re.compile(r"\(\?P?<([^\W\d]\w*)>")
_COMMENT = re.compile(r"\(\?#[^)]*\)")
_FLAGS = re.compile(r"\(\?([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)])")
_HEX = {
    "python": re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})"),
    "ecma": re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,8})\}"),
}
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z_=]+\}")
_MAX_REPEAT = 2**31 - 1


def parse(regex: str, dialect: Dialect) -> Node:
    """Raises ValueError that names a syntax error, or an unsupported construct."""
    return _Parser(regex, dialect).parse()


class _Parser:
    """Recursive descent. The text before `_at` is consumed; `_flags` are those of the current group."""

    def __init__(self, text: str, dialect: Dialect) -> None:
        self._text, self._dialect = text, dialect
        self._at = 0
        self._flags: frozenset[str] = frozenset()
        self._names: set[str] = set()

    def parse(self) -> Node:
        if (found := _FLAGS.match(self._text)) and found[3] == ")" and self._dialect == "python" and found[2] is None:
            self._flags = self._known_flags(found[1])
            self._at = found.end()
        node = self._alternatives(0)
        if self._at < len(self._text):
            raise self._error("a ) without its (")
        return node

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{what} at character {self._at + 1} of a regular expression")

    def _take(self, text: str) -> bool:
        if self._text.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if (found := pattern.match(self._text, self._at)) is not None:
            self._at = found.end()
        return found

    def _next(self) -> str:
        """One character."""
        if self._at == len(self._text):
            raise self._error("an unexpected end")
        self._at += 1
        return self._text[self._at - 1]

    # -----------------------------------------------------------------------------------------------------------
    # Groups.

    def _alternatives(self, depth: int) -> Node:
        if depth > MAX_NESTING:
            raise self._error(f"groups more than {MAX_NESTING} deep")
        branches = [self._sequence(depth)]
        while self._take("|"):
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._dialect == "python" and self._match(_COMMENT):
                continue
            node = self._quantified(self._atom(depth))
            parts += node.parts if isinstance(node, Seq) else [node]
        return parts[0] if len(parts) == 1 else Seq(tuple(parts))

    def _atom(self, depth: int) -> Node:
        if self._text.startswith("(", self._at):
            return self._group(depth)
        if self._quantifier() is not None:
            raise self._error("nothing to repeat")
        match char := self._next():
            case "[":
                return self._set()
            case ".":
                return ANY if "s" in self._flags else _DOT[self._dialect]
            case "^" | "$":
                return Anchor(char == "^")
            case "\\":
                return self._escape()
            case _:
                return self._cased(self._literal(char))

    def _group(self, depth: int) -> Node:
        for opening, what in _REFUSED_GROUPS.items():
            if self._text.startswith(opening, self._at):
                raise self._error(f"{what} {opening}")
        outer = self._flags
        if (named := self._match(_NAMED)) is not None:
            if named[1] in self._names:
                raise self._error(f"two groups named {named[1]!r}")
            self._names.add(named[1])
        elif self._take("(?:"):
            pass
        elif self._text.startswith("(?", self._at):
            self._begin_flags()
        else:
            self._take("(")
        node = self._alternatives(depth + 1)
        if not self._take(")"):
            raise self._error("a ( without its )")
        self._flags = outer
        return node

    def _begin_flags(self) -> None:
        """(?i-s:"""
        found = _FLAGS.match(self._text, self._at)
        if found is None or found[3] == ")" or self._dialect == "ecma":
            raise self._error(f"{self._text[self._at : self._at + 4]!r}, a group that is not known here")
        on, off = self._known_flags(found[1]), self._known_flags(found[2] or "")
        if "a" in off or on & off:
            raise self._error(f"the flags {found[0][2:-1]!r}")
        self._flags = (self._flags | on) - off
        self._at = found.end()

    def _known_flags(self, letters: str) -> frozenset[str]:
        """Only a (the default), i and s are supported."""
        if unknown := set(letters) - set("ais"):
            raise self._error(f"the flag {min(unknown)!r}")
        return frozenset(letters)

    # -----------------------------------------------------------------------------------------------------------
    # Quantifiers.

    def _quantifier(self) -> re.Match[str] | None:
        """The quantifier at this position; a { that does not start one is a literal."""
        found = _QUANTIFIER.match(self._text, self._at)
        if found is not None and found[4] is not None and self._dialect == "ecma":
            raise self._error("{,n}, which is no quantifier in a JSON schema")
        return found

    def _quantified(self, node: Node) -> Node:
        found = self._quantifier()
        if found is None:
            return node
        if isinstance(node, Anchor):
            raise self._error("nothing to repeat")
        self._at = found.end()
        self._take("?")  # laziness does not change what matches
        if self._text.startswith("+", self._at):
            raise self._error("a possessive quantifier")
        if self._quantifier() is not None:
            raise self._error("a quantifier after another")
        match found[0]:
            case "*":
                return Repeat(node, 0, None)
            case "+":
                return Repeat(node, 1, None)
            case "?":
                return Repeat(node, 0, 1)
        low = int(found[1] or 0)
        last = found[4] if found[1] is None else found[3] if found[2] else found[1]
        high = int(last) if last else None
        if max(low, high or 0) > _MAX_REPEAT or (high is not None and low > high):
            raise self._error(f"the quantifier {found[0]}")
        return Repeat(node, low, high)

    # -----------------------------------------------------------------------------------------------------------
    # Characters.

    def _literal(self, char: str) -> Chars:
        if SURROGATES[0] <= ord(char) <= SURROGATES[1]:
            raise self._error("a surrogate, which is half a character")
        return Chars(((ord(char), ord(char)),))

    def _cased(self, chars: Chars) -> Chars:
        """Adds the other case of ASCII letters under the flag i, as with `re.ASCII`."""
        if "i" not in self._flags:
            return chars
        if chars.properties:
            raise self._error(f"{chars.properties[0]} where case is ignored")
        letters = [letter for letter in string.ascii_letters if chars.has(ord(letter))]
        return Chars.of((*chars.ranges, *chars_of("".join(letters).swapcase()).ranges))

    def _escape(self) -> Node:
        """An escape outside a set."""
        char = self._text[self._at : self._at + 1]
        if char in ("b", "B"):
            raise self._error(f"\\{char}, a word boundary")
        if self._dialect == "python" and char in ("A", "Z"):
            self._at += 1
            return Anchor(char == "A")
        return self._cased(self._escaped_chars())

    def _escaped_chars(self) -> Chars:
        """An escape, in a set or outside."""
        start = self._at
        char = self._next()
        named = {"d": _DIGITS, "w": _WORD, "s": _SPACES[self._dialect]}.get(char.lower())
        if named is not None:
            return named if char.islower() else named.complement()
        if char in _CONTROLS:
            return chars_of(_CONTROLS[char])
        if char == "0" and not self._text[self._at : self._at + 1].isdigit():
            return chars_of("\0")
        if char.isdigit():
            raise self._error(f"\\{char}, a back-reference or an octal number")
        self._at = start
        if (found := self._match(_HEX[self._dialect])) is not None:
            return self._literal_point(int(next(filter(None, found.groups())), 16))
        if (found := self._match(_PROPERTY)) is not None:
            return Chars((), (f"\\{found[0]}",))
        self._at += 1
        return self._other_escape(char)

    def _literal_point(self, point: int) -> Chars:
        if self._dialect == "ecma" and 0xD800 <= point < 0xDC00 and (low := self._match(_LOW_HALF)) is not None:
            point = 0x10000 + (point - 0xD800 << 10) + (int(low[1], 16) - 0xDC00)
        if point > LAST:
            raise self._error(f"the code point {point:x}")
        return self._literal(chr(point))

    def _other_escape(self, char: str) -> Chars:
        if self._dialect == "python" and char == "a":
            return chars_of("\a")
        if self._dialect == "ecma" and char == "c" and self._text[self._at : self._at + 1].isascii():
            letter = self._next()
            if letter.isalpha():
                return chars_of(chr(ord(letter) % 32))
        if char.isalnum() and char.isascii():
            raise self._error(f"\\{char}")
        return self._literal(char)

    # -----------------------------------------------------------------------------------------------------------
    # Sets.

    def _set(self) -> Chars:
        is_negated = self._take("^")
        ranges: list[Range] = []
        properties: list[str] = []
        is_first = self._dialect == "python"  # in Python a leading ] is a literal
        while is_first or not self._take("]"):
            is_first = False
            low = self._item()
            is_range = self._text.startswith("-", self._at) and not self._text.startswith("-]", self._at)
            if is_range:
                self._at += 1
                low = self._range(low, self._item())
            ranges += low.ranges
            properties += low.properties
        chars = self._cased(replace(Chars.of(ranges), properties=tuple(properties)))
        chars = chars.complement() if is_negated else chars
        if not chars.ranges and not properties:
            raise self._error("a set without characters")
        return chars

    def _item(self) -> Chars:
        char = self._next()
        if char != "\\":
            return self._literal(char)
        if self._take("b"):
            return chars_of("\b")
        if self._text.startswith("B", self._at):
            raise self._error("\\B")
        return self._escaped_chars()

    def _range(self, low: Chars, high: Chars) -> Chars:
        ends = [chars.ranges[0] for chars in (low, high) if len(chars.ranges) == 1 and not chars.properties]
        if len(ends) < 2 or any(first != last for first, last in ends) or ends[0][0] > ends[1][0]:
            raise self._error("a range of a set that does not go from one character to a later one")
        return Chars.of([(ends[0][0], ends[1][0])])
