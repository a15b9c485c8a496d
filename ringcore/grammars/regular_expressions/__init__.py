"""Parses regular expressions and rewrites them so that every grammar library matches the same texts.

`fullmatch_regex` reads an expression as Python's `re.fullmatch` does with `re.ASCII`; `search_regex` reads an ECMA-262
expression, the patterns of JSON schemas, for a search. Constructs that no grammar library supports (lookaround,
back-references, word boundaries and inner anchors, possessive quantifiers) are refused by name.

The rewritten expression has only constructs on which the libraries agree: letters and digits, code points as
\\u{hex}, sets of ranges of these, (?:...), | and greedy quantifiers, which match the same texts as lazy ones.
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
    """Matches a whole text where `re.fullmatch(regex, text, re.ASCII)` does; \\p{...} is accepted too, which `re`
    lacks. Raises ValueError that names an unsupported construct."""
    return _without_anchors(parse(regex, "python"), is_search=False)


def search_regex(pattern: str) -> Node:
    """Matches a whole text in which the ECMA-262 `pattern` is found. Raises ValueError as `fullmatch_regex`."""
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
        raise ValueError("an anchor (^, $) within a regular expression, where text may precede ^ or follow $")
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
