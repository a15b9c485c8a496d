"""What spans are of: a kind, and a chain of kinds that are recorded at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

__all__ = ["Chain", "Kind"]


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """What a span or moment is of. args: the names of its arguments, in order. form: a span of a thread, or a
    moment in the life of a request, whose id is the first argument."""

    name: str
    args: tuple[str, ...] = ()
    form: Literal["span", "request"] = "span"


class Chain:
    """Spans that follow each other without a gap, recorded at once: the end of one is the begin of the next. Their
    arguments are integers, and each is given once.

    kinds: None is a time in between, which is no span. number: the index in `kinds.CHAINS`. track: where they are
    shown; its spans are recorded by one thread at a time.
    """

    __slots__ = ("args", "kinds", "number", "track")

    def __init__(self, number: int, track: str, *kinds: Kind | None) -> None:
        self.number, self.track, self.kinds = number, track, kinds
        self.args = tuple(dict.fromkeys(name for kind in kinds if kind for name in kind.args))

    def spans(self, fields: Sequence[Any]) -> Iterator[tuple[Kind, int, int, tuple[int, ...]]]:
        """Kind, begin, end and arguments of each. fields: as those of `Tracer.record`; what follows the arguments is
        not read."""
        num_times, num_fields = len(self.kinds) + 1, len(self.kinds) + 1 + len(self.args)
        times = [round(time * 1e9) if isinstance(time, float) else time for time in fields[:num_times]]
        values = dict(zip(self.args, fields[num_times:num_fields], strict=True))
        for index, kind in enumerate(self.kinds):
            if kind is not None:
                yield kind, times[index], times[index + 1], tuple(values[name] for name in kind.args)
