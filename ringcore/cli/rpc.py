"""`ringcore rpc`: calls to a running engine and its workers, from the command line."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from ringcore.cli.call_values import as_json, in_words
from ringcore.cli.engines import KEYS_HELP, choose_engine
from ringcore.cli.tables import table

if TYPE_CHECKING:
    from ringcore.front_end.admin_client import AdminClient
    from ringcore.protocol.methods import RpcMethod

__all__ = ["rpc"]

_EFFECTS = {
    "read": "changes nothing",
    "call": "changes workers or caches",
    "lifecycle": "stops serving, or changes the model",
}


def rpc(
    engine: Annotated[str, typer.Argument(help="a pid, id or model of 'ringcore ps', or tcp://HOST:PORT")],
    method: Annotated[str | None, typer.Argument(help="e.g. stats, memory, stack, sleep; default: list them")] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARG", help="JSON, or else a string")] = None,
    json: Annotated[bool, typer.Option("--json", help="print JSON, one line per rank")] = False,
    timeout: Annotated[float, typer.Option(help="seconds until the call times out")] = 30.0,
    rank: Annotated[int | None, typer.Option(help="every rank executes the call, only this one replies")] = None,
    of_engine: Annotated[bool, typer.Option("--engine", help="call the engine's own method, not the workers'")] = False,
    keys: Annotated[Path | None, typer.Option(help=KEYS_HELP)] = None,
) -> None:
    """Calls a method on every worker of a running engine, or of the engine itself, and prints what each returned.
    Without METHOD it lists what can be called: who executes it, which scope it needs, what it changes.

    An engine of this user on this host needs no key, and allows every call. Over TCP the scopes of the key, in clients/
    of the engine's keys, must have the method's: read, call or lifecycle. A name that engine and workers both have,
    such as stats, is the workers' unless --engine is given.

    Examples:

    \b
      ringcore rpc 4242
      ringcore rpc 4242 stats
      ringcore rpc SmolLM2-135M stats --json
      ringcore rpc 4242 stack --rank 0
      ringcore rpc 4242 pause all
      ringcore rpc 4242 set_level debug 3 '{"modules": ["a"]}'
      ringcore rpc 4242 shift -- -1
      ringcore rpc tcp://127.0.0.1:5600 stats --keys ./admin-keys
    """
    from ringcore.errors import InvalidRequestError, RpcTimeoutError

    if rank is not None and (of_engine or method is None):
        raise InvalidRequestError(
            f"rank={rank}: only calls to workers have one; leave it out", field="rank", value=rank
        )
    try:
        with choose_engine(engine, keys).connect() as client:
            if method is None:
                listing = client.methods(timeout)
                lines = [as_json(one) for one in listing] if json else _table(listing)
            else:
                values = _call(client, method, [_argument(a) for a in args or []], timeout, rank, of_engine)
                lines = [as_json(value) for value in values.values()] if json else in_words(values)
    except RpcTimeoutError as error:
        raise _explained(error, engine) from error
    for line in lines:
        print(line, flush=True)


def _call(
    client: AdminClient, method: str, args: list[Any], timeout: float, rank: int | None, of_engine: bool
) -> dict[int | None, Any]:
    """The value of each rank; rank None: the engine's own."""
    if of_engine or (rank is None and _is_of_engine_alone(client, method, timeout)):
        return {None: client.call_engine(method, args, None, timeout)}
    values = client.collective_rpc(method, args, None, timeout, rank)
    return dict(enumerate(values)) if rank is None else {rank: values}


def _is_of_engine_alone(client: AdminClient, method: str, timeout: float) -> bool:
    """Whether the engine has such a method, and its workers have none."""
    from ringcore.engine_core.admin.operator_calls import OPERATOR_CALLS
    from ringcore.engine_core.admin.public_methods import ENGINE_CALLS
    from ringcore.errors import PermissionDeniedError

    if method in ENGINE_CALLS or method in OPERATOR_CALLS:
        with suppress(PermissionDeniedError):  # without the scope "read" the engine says itself where the method is
            return not any((one.target, one.name) == ("workers", method) for one in client.methods(timeout))
    return False


def _explained(error: Exception, engine: str) -> Exception:
    """The timeout, with what is known of an engine on this host that does not answer."""
    from ringcore.errors import RingcoreError, RpcTimeoutError
    from ringcore.front_end.engine_survey import silence
    from ringcore.front_end.local_engines import find_engine

    assert isinstance(error, RpcTimeoutError)
    with suppress(RingcoreError):
        if "://" not in engine and (known := silence(find_engine(engine))) is not None:
            return RpcTimeoutError(f"{error.message}; it is {known[0]}: {known[1]}", **error.details)
    return error


def _table(methods: list[RpcMethod]) -> list[str]:
    rows = [[one.target, one.scope, _EFFECTS[one.scope], f"{one.name}{one.signature}", one.summary] for one in methods]
    return table(["OF", "SCOPE", "EFFECT", "METHOD", ""], rows)


def _argument(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text
