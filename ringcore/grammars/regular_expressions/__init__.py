"""Regular expressions, read by one set of rules and written again so that every library matches the same texts.

`fullmatch_regex` reads an expression as Python's `re` does with `re.ASCII`, for `re.fullmatch`; `search_regex` reads
one as ECMA-262 does, which is what the patterns of JSON schemas are, for a search. What no library of grammars matches
(lookaround, back-references, places within a text, possessive quantifiers) is refused by name.

What comes back has none of the constructs that libraries disagree on: letters and digits, code points as \\u{hex},
sets of ranges of these, (?:...), | and quantifiers. A quantifier that prefers few matches the same texts as any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ringcore.grammars.regular_expressions.nodes import ANY, Alt, Anchor, Chars, Node, Repeat, Seq
from ringcore.grammars.regular_expressions.parser import parse
from ringcore.grammars.regular_expressions.writer import write_regex

__all__ = [
    "ANY",
    "Alt",
    "Anchor",
    "Chars",
    "Node",
    "Repeat",
    "Seq",
    "fullmatch_regex",
    "search_regex",
    "write_regex",
]


def fullmatch_regex(regex: str) -> Node:
    """What matches a whole text where `re.fullmatch(regex, text, re.ASCII)` does. \\p{...} is taken too, which `re`
    has not. Raises ValueError that names what cannot be kept."""
    return _without_anchors(parse(regex, "python"), is_search=False)


def search_regex(pattern: str) -> Node:
    """What matches a whole text in which ECMA-262's `pattern` is found. Raises ValueError as `fullmatch_regex`."""
    return _without_anchors(parse(pattern, "ecma"), is_search=True)


@dataclass(frozen=True, slots=True)
class _Branch:
    """One alternative, without the anchors at its ends."""

    node: Node
    at_start: bool
    at_end: bool


def _without_anchors(node: Node, *, is_search: bool) -> Node:
    rest = Repeat(ANY, 0, None)
    found = []
    for branch in _branches(node):
        before = [rest] if is_search and not branch.at_start else []
        after = [rest] if is_search and not branch.at_end else []
        found.append(Seq((*before, branch.node, *after)))
    return found[0] if len(found) == 1 else Alt(tuple(found))


def _branches(node: Node) -> Iterable[_Branch]:
    if isinstance(node, Alt):
        for branch in node.branches:
            yield from _branches(branch)
        return
    parts = list(node.parts) if isinstance(node, Seq) else [node]
    first = next((i for i, part in enumerate(parts) if part != Anchor(True)), len(parts))
    end = next((i for i in range(len(parts), first, -1) if parts[i - 1] != Anchor(False)), first)
    inner = Seq(tuple(parts[first:end]))
    if _has_anchor(inner):
        raise ValueError("an anchor (^, $) within a regular expression, where something may stand before ^ or behind $")
    yield _Branch(inner, at_start=first > 0, at_end=end < len(parts))


def _has_anchor(node: Node) -> bool:
    match node:
        case Anchor():
            return True
        case Seq(parts) | Alt(parts):
            return any(_has_anchor(part) for part in parts)
        case Repeat(inner):
            return _has_anchor(inner)
        case Chars():
            return False
