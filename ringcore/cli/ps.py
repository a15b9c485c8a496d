"""`ringcore ps`: the engines of this user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ringcore.cli.tables import age, count, printable, table

if TYPE_CHECKING:
    from ringcore.front_end.engine_survey import EngineReport

__all__ = ["ps"]

_HEADER = ("PID", "OWNER", "ID", "MODEL", "STATE", "AGE", "RUNNING", "WAITING", "TOKENS/S", "KV", "RANKS")


def ps(
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object a line")] = False,
    timeout: Annotated[float, typer.Option(help="seconds to wait for an engine's answer")] = 1.0,
) -> None:
    """Lists the engines that this user runs on this host, the oldest first; for root those of every user.

    OWNER is the process that started it: the engines of one service have the same.

    An engine that does not answer is listed all the same, with what the kernel and its shared memory say of it: that
    it is starting, or hangs. They are asked together, and none stops computing for it.

    Examples:

    \b
      ringcore ps
      ringcore ps --json
    """
    import os

    import msgspec

    from ringcore.front_end.engine_survey import survey
    from ringcore.front_end.local_engines import local_engines
    from ringcore.params.field_checks import check_timeout

    check_timeout("timeout", timeout, or_none=False)
    reports = survey(local_engines(), timeout)
    if as_json:
        for report in reports:
            print(msgspec.json.encode(report).decode())
    elif reports:
        print("\n".join(in_words(reports, os.geteuid())))
    else:
        print(f"user {os.geteuid()} runs no engine in this network namespace")


def in_words(reports: list[EngineReport], uid: int) -> list[str]:
    """The lines of a table, and a line for each engine whose state needs an explanation. uid: this user."""
    has_others = any(report.uid != uid for report in reports)
    rows = [[*_row(report), *([str(report.uid)] if has_others else [])] for report in reports]
    lines = table([*_HEADER, *(["USER"] if has_others else [])], rows)
    return lines + [f"{one.pid} is {one.state}: {printable(one.detail)}" for one in reports if one.detail]


def _row(report: EngineReport) -> list[str]:
    devices = " ".join(dict.fromkeys(report.devices))
    return [
        str(report.pid),
        _figure(report.owner_pid),
        report.engine_id,
        report.model or "?",
        report.state,
        "?" if report.age_s is None else age(report.age_s),
        _figure(report.num_running),
        _figure(report.num_waiting),
        "-" if report.generated_tokens_per_s is None else count(report.generated_tokens_per_s),
        "-" if report.kv_cache_use is None else f"{report.kv_cache_use:.0%}",
        f"{_figure(report.num_ranks)} {devices}".rstrip(),
    ]


def _figure(value: int | None) -> str:
    return "-" if value is None else str(value)
