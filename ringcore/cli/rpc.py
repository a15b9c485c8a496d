"""`ringcore rpc`: calls to a running engine and its workers, from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

if TYPE_CHECKING:
    from ringcore.protocol.methods import RpcMethod

__all__ = ["rpc"]


def rpc(
    endpoint: Annotated[str, typer.Argument(help="tcp://HOST:PORT, as the engine's EngineReady.admin_endpoint")],
    keys: Annotated[Path, typer.Option(help="a directory with server.key and client.key_secret")],
    method: Annotated[str | None, typer.Argument(help="e.g. stats, memory, stack, sleep; --list has them all")] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARG", help="JSON, or else a string")] = None,
    timeout: Annotated[float, typer.Option(help="seconds until the call times out")] = 30.0,
    rank: Annotated[int | None, typer.Option(help="every rank executes the call, only this one replies")] = None,
    engine: Annotated[bool, typer.Option("--engine", help="call the engine itself, e.g. pause")] = False,
    list_methods: Annotated[bool, typer.Option("--list", help="print what can be called, and by which scope")] = False,
) -> None:
    """Calls a method on every worker of a running engine, and prints what each returned: JSON, one line per rank.

    The key's scopes, in clients/ of the engine's keys, must have the method's: read (changes nothing), call (any other
    worker method) or lifecycle (stops serving or changes the model).

    Examples:

    \b
      ringcore rpc tcp://127.0.0.1:5600 --list --keys ./admin-keys
      ringcore rpc tcp://127.0.0.1:5600 stats --keys ./admin-keys
      ringcore rpc tcp://127.0.0.1:5600 stack --keys ./admin-keys --rank 0
      ringcore rpc tcp://127.0.0.1:5600 pause all --engine --keys ./admin-keys
      ringcore rpc tcp://127.0.0.1:5600 set_level debug 3 '{"modules": ["a"]}' --keys ./admin-keys
      ringcore rpc tcp://127.0.0.1:5600 shift --keys ./admin-keys -- -1
    """
    from ringcore.errors import InvalidRequestError
    from ringcore.front_end.admin_client import AdminClient

    if (method is None) != list_methods:
        raise InvalidRequestError("METHOD: give the name of a method, or --list", field="method", value=method)
    if rank is not None and (engine or list_methods):
        raise InvalidRequestError(
            f"rank={rank}: only calls to workers have one; leave it out", field="rank", value=rank
        )
    arguments = [_argument(a) for a in args or []]
    with AdminClient(endpoint, keys) as client:
        if method is None:
            lines = _table(client.methods(timeout))
        elif engine:
            lines = [_json(client.call_engine(method, arguments, None, timeout))]
        else:
            values = client.collective_rpc(method, arguments, None, timeout, rank)
            lines = [_json(value) for value in (values if rank is None else [values])]
    for line in lines:
        print(line, flush=True)


def _table(methods: list[RpcMethod]) -> list[str]:
    """One line per method: target, scope, effect, signature, summary."""
    lines = []
    for one in methods:
        effect = "reads" if one.read_only else "changes"
        lines.append(f"{one.target:8} {one.scope:10} {effect:8} {one.name}{one.signature}  {one.summary}".rstrip())
    return lines


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def _argument(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text


def _plain(value: Any) -> Any:
    """Converts arrays and tensors to nested lists, a complex number to [real, imag]."""
    return [value.real, value.imag] if isinstance(value, complex) else value.tolist()
