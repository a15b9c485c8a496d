"""The syntax tree of a regular expression."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

__all__ = ["ANY", "LAST", "SURROGATES", "Alt", "Anchor", "Chars", "Node", "Range", "Repeat", "Seq", "chars_of"]

Range: TypeAlias = tuple[int, int]

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


@dataclass(frozen=True, slots=True)
class Chars:
    """A character class: sorted, disjoint ranges of code points without surrogates.

    properties: \\p{...} verbatim. is_negated: only with properties; otherwise the ranges are complemented.
    """

    ranges: tuple[Range, ...]
    properties: tuple[str, ...] = ()
    is_negated: bool = False

    @classmethod
    def of(cls, ranges: Iterable[Range]) -> Chars:
        """From ranges in any order, which may overlap."""
        merged: list[Range] = []
        for low, high in sorted(ranges):
            if merged and low <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        below, above = SURROGATES[0] - 1, SURROGATES[1] + 1
        halves = [part for low, high in merged for part in ((low, min(high, below)), (max(low, above), high))]
        return cls(tuple((low, high) for low, high in halves if low <= high))

    def complement(self) -> Chars:
        if self.properties:
            return replace(self, is_negated=not self.is_negated)
        starts = [0, *(high + 1 for _, high in self.ranges)]
        ends = [*(low - 1 for low, _ in self.ranges), LAST]
        return Chars.of((low, high) for low, high in zip(starts, ends, strict=True) if low <= high)

    def has(self, point: int) -> bool:
        return any(low <= point <= high for low, high in self.ranges)

    def without(self, points: Iterable[int]) -> Chars:
        return Chars.of((*self.complement().ranges, *((point, point) for point in points))).complement()


@dataclass(frozen=True, slots=True)
class Seq:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    branches: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """high: None for unbounded."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """The start or the end of the text."""

    is_start: bool


Node: TypeAlias = Chars | Seq | Alt | Repeat | Anchor


def chars_of(text: str) -> Chars:
    """The class of the characters of a text."""
    return Chars.of((ord(char), ord(char)) for char in text)


ANY = Chars(()).complement()
