"""For benchmarks of many small cases: the turns of all engines at each, and measurements made of their rows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness import Fleet, interleave, note
from benchmarks.peers.queue_loops import cpu_s
from benchmarks.result import Check, Limit, Measurement

__all__ = ["Turns", "measurements_from_rows"]


class Turns:
    """The turns of a fleet's engines at one case after the other."""

    def __init__(self, fleet: Fleet, rounds: int) -> None:
        self._fleet, self._rounds = fleet, rounds
        self._least_share: dict[str, float] = {}

    def take(self, shown: str, command: str, timeout_s: float, **arguments: Any) -> dict[str, list[Any]]:
        """What each engine replied to the command, round by round, interleaved. `shown`: what is noted as progress."""

        def turn(name: str, round_: int) -> Any:
            with self._fleet.turn(name) as driver:
                pid, began_s = driver.processes()[0].pid, time.perf_counter()
                before_s = cpu_s(pid)
                value = driver.call(command, timeout_s, **arguments)
                share = (cpu_s(pid) - before_s) / (time.perf_counter() - began_s)
                self._least_share[name] = min(share, self._least_share.get(name, 1.0))
                return value

        note(f"{shown}: {self._rounds} rounds")
        return interleave(list(self._fleet.facts), self._rounds, turn)

    def measure(
        self, shown: str, command: str, timeout_s: float, *, limits: Mapping[str, Limit] | None = None, **arguments: Any
    ) -> list[Measurement]:
        """Of a command that replies with rows; their names begin with `shown`."""
        return measurements_from_rows(self.take(shown, command, timeout_s, **arguments), limits, prefix=f"{shown}, ")

    def core_checks(self) -> list[Check]:
        """What of a core each engine had, the least of all turns: where it is less than all, others ran in its place,
        and the figures are too high. For engines of one process with one thread, which never waits.
        """
        name = "least share of a core that {} had, in any turn"
        return [Check(name=name.format(e), value=f"{s:.0%}", data=s) for e, s in self._least_share.items()]


def measurements_from_rows(
    taken: Mapping[str, Sequence[Sequence[Sequence[Any]]]],
    limits: Mapping[str, Limit] | None = None,
    prefix: str = "",
) -> list[Measurement]:
    """A measurement for each kind of row, in the order in which they come, its name after `prefix`.

    taken: of each engine, round by round, rows of name, unit and value; of a unit "/s" more is better.
    limits: by the row's name.
    """
    table: dict[tuple[str, str], dict[str, list[float]]] = {}
    for engine, rounds in taken.items():
        for name, unit, value in (row for rows in rounds for row in rows):
            table.setdefault((name, unit), {}).setdefault(engine, []).append(value)
    return [
        Measurement(
            name=prefix + name,
            unit=unit,
            higher_is_better=unit.endswith("/s"),
            samples=samples,
            limit=(limits or {}).get(name),
        )
        for (name, unit), samples in table.items()
    ]
