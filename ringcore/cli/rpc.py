"""`ringcore rpc`: a method of a running engine's workers, from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

__all__ = ["rpc"]


def rpc(
    endpoint: Annotated[str, typer.Argument(help="tcp://HOST:PORT, as the engine's EngineReady.admin_endpoint")],
    method: Annotated[str, typer.Argument(help="a worker method declared with @rpc, e.g. stats, memory, stack")],
    keys: Annotated[Path, typer.Option(help="a directory with server.key and client.key_secret")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARG", help="JSON, or else a string")] = None,
    timeout: Annotated[float, typer.Option(help="seconds until the call is given up")] = 30.0,
    rank: Annotated[int | None, typer.Option(help="every rank executes the call, this one alone answers")] = None,
) -> None:
    """Calls a method on every worker of a running engine, and prints what each returned: JSON, one line a rank.

    Examples:

    \b
      ringcore rpc tcp://127.0.0.1:5600 stats --keys ./admin-keys
      ringcore rpc tcp://127.0.0.1:5600 stack --keys ./admin-keys --rank 0
      ringcore rpc tcp://127.0.0.1:5600 set_level debug 3 '{"modules": ["a"]}' --keys ./admin-keys
      ringcore rpc tcp://127.0.0.1:5600 shift --keys ./admin-keys -- -1
    """
    from ringcore.admin import AdminClient

    with AdminClient(endpoint, keys) as client:
        values = client.collective_rpc(method, [_argument(a) for a in args or []], None, timeout, rank)
    for value in values if rank is None else [values]:
        print(msgspec.json.encode(value, enc_hook=_plain).decode(), flush=True)


def _argument(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text


def _plain(value: Any) -> Any:
    """Arrays and tensors as nested lists, a complex number as its two parts."""
    return [value.real, value.imag] if isinstance(value, complex) else value.tolist()
