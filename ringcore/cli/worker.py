"""`ringcore worker`: this host runs workers of an engine on another one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["worker"]


def worker(
    join: Annotated[str, typer.Option(help="tcp://HOST:PORT, the engine's join_endpoint", show_default=False)],
    keys: Annotated[
        Path,
        typer.Option(help="a directory with server.key and client.key_secret of 'ringcore keys'", show_default=False),
    ],
    name: Annotated[
        str | None, typer.Option(help="this host's name in the engine's hosts; default: its hostname")
    ] = None,
    patience: Annotated[float, typer.Option(help="seconds to try for without a connection to the engine")] = 600.0,
) -> None:
    """Runs workers of an engine on another host, until that engine ends.

    The engine says which host runs which rank, and where the others join it: here b runs the last command. Every host
    needs the same ringcore, the model at the same path, and a private network: what ranks send each other (gloo, NCCL)
    is not encrypted.

    Examples:

    \b
      ringcore keys ./join-keys
      ringcore generate --model ./model --prompt "Once upon a time" --tensor-parallel-size 2 --hosts localhost \\
        --hosts b --join-endpoint tcp://10.0.0.1:5700 --join-keys ./join-keys
      ringcore worker --join tcp://10.0.0.1:5700 --keys ./join-keys --name b
    """
    import socket

    from ringcore.config.admin_keys import check_endpoint, read_client_keys
    from ringcore.executor.far.agent import serve_engine

    check_endpoint("join", join, to_listen=False)
    serve_engine(join, read_client_keys(keys), name or socket.gethostname(), patience)
