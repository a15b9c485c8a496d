"""The command `ringcore top`: the live view, one picture, or one sample."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ringcore.cli.engines import ENGINE_HELP, KEYS_HELP, EngineAddress, choose_engine, local_address
from ringcore.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from ringcore.cli.top.source import AdminSource, Choice

__all__ = ["top"]

_FILE_WIDTH = 120  # of a picture that goes into a file or a pipe
_INTERVALS_S = 0.1, 3600.0
_SURVEY_S = 1.0


def top(
    engine: Annotated[str | None, typer.Argument(help=ENGINE_HELP)] = None,
    keys: Annotated[Path | None, typer.Option(help=KEYS_HELP)] = None,
    interval: Annotated[float, typer.Option(help="seconds between two looks")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one picture as text, and end")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one sample as JSON, and end")] = False,
) -> None:
    """Shows what an engine does: requests, tokens/s, where the time of steps goes, KV cache blocks, memory and
    utilisation of each process, the slowest requests. Keys pause, abort, dump and sleep; ? explains.

    The engine answers between two steps, and never waits for this program. It may hang, restart its workers or end: the
    last picture stays.

    Examples:

    \b
      ringcore top
      ringcore top SmolLM2-135M --interval 0.5
      ringcore top 4242 --once
      ringcore top 4242 --json
      ringcore top tcp://127.0.0.1:5600 --keys ./admin-keys
    """
    low, high = _INTERVALS_S
    if not low <= interval <= high:
        raise InvalidRequestError(f"interval={interval}: give {low} to {high:.0f} s", field="interval", value=interval)
    if once and as_json:
        raise InvalidRequestError("once, json: give one of --once and --json", field="once", value=True)
    if as_json:
        print(_sample(choose_engine(engine, keys)))
    elif once:
        print(_picture(choose_engine(engine, keys), interval), end="")
    else:
        _show(engine, keys, interval)


def _source(address: EngineAddress) -> AdminSource:
    from ringcore.cli.top.source import AdminSource

    return AdminSource(address)


def _sample(address: EngineAddress) -> str:
    source = _source(address)
    try:
        return json.dumps(msgspec.to_builtins(source.sample()))
    finally:
        source.close()


def _picture(address: EngineAddress, interval_s: float) -> str:
    """Of two samples: rates are of the time between them."""
    from ringcore.cli.top.monitor import View
    from ringcore.cli.top.picture import picture
    from ringcore.cli.top.sample import pace_between

    source = _source(address)
    try:
        first = source.sample()
        time.sleep(interval_s)
        second = source.sample()
    finally:
        source.close()
    pace = pace_between(first, second)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else _FILE_WIDTH
    return picture(View(address.name, "live", second, pace), 0.0, width)


def _show(engine: str | None, keys: Path | None, interval_s: float) -> None:
    try:
        from ringcore.cli.top.app import TopApp
    except ImportError as error:
        raise ConfigError(
            f"top needs {error.name}: pip install 'ringcore[cli]', or give --once", option="top", value=error.name
        ) from error
    first = _first(engine, keys)
    TopApp(_all_engines(engine, first), first, interval_s).run()


def _first(engine: str | None, keys: Path | None) -> Choice | None:
    """The engine that is meant; None: it is chosen from the list."""
    from ringcore.front_end.local_engines import local_engines

    if engine is None and keys is None and len(local_engines()) != 1:
        return None
    return _choice(choose_engine(engine, keys), "")


def _all_engines(engine: str | None, first: Choice | None) -> Callable[[], list[Choice]]:
    """This user's, and one that was given by its address."""
    remote = [first] if first is not None and engine is not None and engine.startswith("tcp://") else []
    return lambda: [*remote, *_local_choices()]


def _local_choices() -> list[Choice]:
    from ringcore.front_end.engine_survey import survey
    from ringcore.front_end.local_engines import local_engines

    engines = [one for one in local_engines() if one.uid == os.geteuid()]
    return [
        _choice(local_address(one), f"pid {report.pid}, {report.state}, {report.num_running or 0} running")
        for one, report in zip(engines, survey(engines, _SURVEY_S), strict=True)
    ]


def _choice(address: EngineAddress, description: str) -> Choice:
    from ringcore.cli.top.source import Choice

    return Choice(address.name, description, lambda: _source(address))
