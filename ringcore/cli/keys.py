"""`ringcore keys`: the keys of an admin endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["keys"]


def keys(
    directory: Annotated[Path, typer.Argument(help="a new directory for the keys")],
    scope: Annotated[
        list[str] | None,
        typer.Option(help="read, call or lifecycle, what the client may call; give it again for more; default: all"),
    ] = None,
) -> None:
    """Makes the keys of an engine's admin endpoint and of one client.

    The scopes are a line in the client's public key, clients/client.key, which can be edited: read changes nothing
    (stats, stack, health), call is any other worker method, lifecycle stops serving or changes the model (pause,
    sleep, new weights). A file without that line may read alone.

    Examples:

    \b
      ringcore keys ./admin-keys
      ringcore keys ./watcher-keys --scope read
      ringcore generate --model ./model --admin-endpoint tcp://127.0.0.1:5600 --admin-keys ./admin-keys ...
      ringcore rpc tcp://127.0.0.1:5600 stats --keys ./admin-keys

    For another client make keys in another directory, and copy its clients/client.key, its scopes with it, into
    clients/ here, under another name that ends in .key; that client keeps its client.key_secret together with a
    copy of this server.key.
    """
    from ringcore.config.admin_keys import create_keys
    from ringcore.protocol.scopes import SCOPES

    path = create_keys(directory, scope or SCOPES)
    print(f"{path}: keys of an engine and of one client.")
    print(f"The engine uses the whole directory: admin_keys={str(path)!r}.")
    print("A client on another host needs two files, in a directory of its own that it gives as --keys:")
    print(f"  {path / 'server.key'}         a copy")
    print(f"  {path / 'client.key_secret'}  to be moved, over a confidential channel (scp)")
    print("server.key_secret stays here. The engine reads its keys when it starts.")
