"""`ringcore doctor`: checks of this machine."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from ringcore.cli.tables import printable

if TYPE_CHECKING:
    from ringcore.protocol.finding import Finding

__all__ = ["doctor", "in_words"]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="print a JSON object a line")] = False) -> None:
    """Checks this machine: packages, processors, memory, limits, system calls, the port of the service, caches, GPUs,
    Triton, and which attention backends and linear schemes can be used. Says what mends each fault.

    Exit code 1 if there is an error, something that keeps models from running; a warning is something that can be
    better. A check that hangs or ends its process is an error too, and the others go on.

    Examples:

    \b
      ringcore doctor
      ringcore doctor --json
    """
    import msgspec

    from ringcore.front_end.doctor.examination import examine

    levels: Counter[str] = Counter()
    for finding in examine():
        levels[finding.level] += 1
        if as_json:
            print(msgspec.json.encode(finding).decode(), flush=True)
        else:
            print("\n".join(in_words(finding)), flush=True)
    if not as_json:
        print(f"{levels['ok']} ok, {_count(levels['warning'], 'warning')}, {_count(levels['error'], 'error')}")
    if levels["error"]:
        raise typer.Exit(1)


def in_words(finding: Finding) -> list[str]:
    lines = [f"{finding.level:<8} {finding.check:<19} {printable(finding.found)}"]
    return lines if finding.mend is None else [*lines, f"{'':<28} mend: {printable(finding.mend)}"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
