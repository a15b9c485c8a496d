"""`ringcore trace`: a timeline of a running engine's processes, as a file for Perfetto."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringcore.front_end.admin_client import AdminClient

__all__ = ["trace"]


def trace(
    engine: Annotated[
        str | None,
        typer.Argument(help="its pid, id or model, or tcp://HOST:PORT with --keys; default: this user's only engine"),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="for tcp://: a directory with server.key and client.key_secret")
    ] = None,
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

    if not output.parent.is_dir():
        raise ConfigError(f"output={str(output)!r}: no such directory", option="output", value=str(output))
    with _client(engine, keys) as client:
        file = record_timeline(client, seconds, operators)
    data = msgspec.json.encode(file)
    output.write_bytes(gzip.compress(data, compresslevel=5) if output.suffix == ".gz" else data)
    for note in file["otherData"]["notes"]:
        typer.echo(f"ringcore: {note}", err=True)
    print(f"{output}: {len(file['traceEvents']):,} events; open it at ui.perfetto.dev")


def _client(engine: str | None, keys: Path | None) -> AdminClient:
    from ringcore.errors import InvalidRequestError
    from ringcore.front_end.admin_client import AdminClient

    is_local = engine is None or not engine.startswith("tcp://")
    if is_local and keys is not None:
        raise InvalidRequestError(f"keys={str(keys)!r}: only tcp://HOST:PORT needs keys", field="keys", value=str(keys))
    if not is_local and keys is None:
        raise InvalidRequestError(f"keys: give the keys of {engine} as --keys", field="keys", value=None)
    return AdminClient.local(engine) if engine is None or is_local else AdminClient(engine, keys)
