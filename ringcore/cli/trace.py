"""`ringcore trace`: a timeline of a running engine's processes, as a file for Perfetto."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Annotated

import typer

from ringcore.cli.engines import ENGINE_HELP, KEYS_HELP, choose_engine

__all__ = ["trace"]


def trace(
    engine: Annotated[str | None, typer.Argument(help=ENGINE_HELP)] = None,
    keys: Annotated[Path | None, typer.Option(help=KEYS_HELP)] = None,
    seconds: Annotated[float, typer.Option(help="how long to record; Ctrl-C ends it earlier")] = 5.0,
    output: Annotated[Path, typer.Option(help="the file; compressed if its name ends with .gz")] = Path(
        "trace.json.gz"
    ),
    operators: Annotated[
        bool, typer.Option("--operators", help="torch's operators in the workers too, which slows these")
    ] = False,
) -> None:
    """Records what every process of a running engine does, into one timeline: front end, engine, workers, the kernels
    of a GPU, and each request with its queue, prefill and decode. Perfetto (ui.perfetto.dev) and chrome://tracing show
    it.

    The engine serves on meanwhile. Tracing ends by itself where this command does not end it.

    Examples:

    \b
      ringcore trace
      ringcore trace smollm2-135m --seconds 2 --operators --output step.json.gz
      ringcore trace tcp://127.0.0.1:5600 --keys ./admin-keys --seconds 10
    """
    import msgspec

    from ringcore.errors import ConfigError
    from ringcore.front_end.engine_trace import record_timeline

    if not os.access(output.parent, os.W_OK):
        text = f"output={str(output)!r}: give a path in a directory that you may write to"
        raise ConfigError(text, option="output", value=str(output))
    with choose_engine(engine, keys).connect() as client:
        file = record_timeline(client, seconds, operators)
    data = msgspec.json.encode(file)
    output.write_bytes(gzip.compress(data, compresslevel=5) if output.suffix == ".gz" else data)
    for note in file["otherData"]["notes"]:
        typer.echo(f"ringcore: {note}", err=True)
    print(f"{output}: {len(file['traceEvents']):,} events; open it at ui.perfetto.dev")
