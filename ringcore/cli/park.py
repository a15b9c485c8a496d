"""`ringcore park`: engines that are started ahead, for programs that start later."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ringcore.cli.options import engine_options, given, with_options
from ringcore.cli.tables import printable, table
from ringcore.errors import ConfigError
from ringcore.host.byte_sizes import format_bytes

__all__ = ["make_park"]

_HEADER = ("PID", "MODEL", "PARKED", "LEVEL", "ENGINES", "MEMORY")


def make_park() -> Callable[..., None]:
    """The command, with a flag for every engine option; the model is its argument."""
    return with_options(park, _engine_flags())


def park(
    model: Annotated[str | None, typer.Argument(help="a model folder, a .gguf file, or a hub id")] = None,
    keep: Annotated[int, typer.Option(min=1, help="how many engines are parked; one that was adopted is replaced")] = 1,
    level: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2,
            help="how deep they sleep: 1 with weights in host memory, 2 without weights, 0 with all their memory; "
            "default: 1 with --enable-sleep-mode, else 0",
        ),
    ] = None,
    is_list: Annotated[bool, typer.Option("--list", help="list the parked engines of this user, and exit")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="end those of MODEL, or all of this user, and exit")] = False,
    **options: Any,
) -> None:
    """Starts engines ahead, has them sleep, and gives each to the first program that asks: a start takes a second then.

    LLM(..., start_from="parked") and the commands with --start-from parked adopt one, where the options, the model's
    files, the versions, the processor cores and the environment variables of the libraries are equal; else they start
    an engine of their own, and log what differs. An engine that was adopted ends with the program that adopted it; the
    parked ones end with this command.

    Examples:

    \b
      ringcore park ./model
      ringcore park ./model --keep 2 --enable-sleep-mode --level 1
      ringcore serve ./model --start-from parked
      ringcore park --list
      ringcore park --stop
    """
    if is_list:
        print("\n".join(_lines()))
        return
    if stop:
        _stop(model)
        return
    if model is None:
        raise ConfigError("model: name the model to park, or give --list or --stop", option="model", value=None)
    from ringcore.front_end.parking.parked_engines import ParkedEngines

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with ParkedEngines(model, keep=keep, level=level, **given(options, _engine_flags())) as engines:
            engines.wait()
            print(f"ringcore: {keep} of {printable(model)} parked; Ctrl-C ends", flush=True)
            engines.wait_closed()
    except KeyboardInterrupt:
        return


def _engine_flags() -> list[Any]:
    return [option for option in engine_options() if option.name not in ("model", "start_from")]


def _lines() -> list[str]:
    from ringcore.front_end.parking.offers import host_bytes, offers

    found = list(offers())
    if not found:
        return [f"user {os.geteuid()} keeps no parked engine in this network namespace"]
    rows = []
    for one in found:
        engines = " ".join(str(pids["engine"]) for pids in one.pids) or "-"
        parked = f"{len(one.pids)} of {one.keep}"
        rows.append([str(one.pid), one.model, parked, str(one.level), engines, format_bytes(host_bytes(one))])
    failures = [f"{one.pid}: the last start failed: {printable(one.error)}" for one in found if one.error]
    return table(_HEADER, rows) + failures


def _stop(model: str | None) -> None:
    """Raises `InvalidRequestError` where there is none, `RpcTimeoutError` for one that does not end."""
    from ringcore.front_end.parking.offers import stop_parks

    for offer in stop_parks(model):
        print(f"ringcore: process {offer.pid} keeps no more of {printable(offer.model)}")
