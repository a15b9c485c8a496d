"""`ringcore rpc`: calls to a running engine and its workers, from the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ringcore.cli.call_values import as_json, in_words
from ringcore.cli.engine_call import EngineCall, explained
from ringcore.cli.engines import KEYS_HELP, choose_engine
from ringcore.cli.tables import table

if TYPE_CHECKING:
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
    of_all: Annotated[bool, typer.Option("--all", help="call every engine of this user on this host")] = False,
    of: Annotated[str | None, typer.Option(help="call every engine of a service, by its pid, or of a model")] = None,
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

    With --all or --of there is no ENGINE: METHOD comes first. The engines are asked at once, and one that fails hides
    no other; then the exit code is 1.

    Examples:

    \b
      ringcore rpc 4242
      ringcore rpc 4242 stats
      ringcore rpc SmolLM2-135M stats --json
      ringcore rpc 4242 stack --rank 0
      ringcore rpc 4242 pause all
      ringcore rpc 4242 set_level debug 3 '{"modules": ["a"]}'
      ringcore rpc 4242 shift -- -1
      ringcore rpc --all stats
      ringcore rpc --of SmolLM2-135M stack --json
      ringcore rpc tcp://127.0.0.1:5600 stats --keys ./admin-keys
    """
    if of_all or of is not None:
        words = [*([] if method is None else [method]), *(args or [])]
        _call_several(EngineCall(engine, words, timeout, rank, of_engine), of, keys, json)
    elif method is not None:
        _print(_call_one(EngineCall(method, args or [], timeout, rank, of_engine), engine, keys, json))
    else:
        _print(_methods(engine, keys, timeout, rank, json))


def _call_several(call: EngineCall, of: str | None, keys: Path | None, json: bool) -> None:
    from ringcore.cli.several_engines import call_each, check_answers
    from ringcore.errors import InvalidRequestError
    from ringcore.front_end.local_engines import find_engines

    if keys is not None:
        raise InvalidRequestError(f"keys={str(keys)!r}: engines of this host need none", field="keys", value=None)
    answers = []
    for answer in call_each(call, find_engines(of)):
        _print(answer.as_json() if json else answer.in_words())
        answers.append(answer)
    check_answers(answers)


def _call_one(call: EngineCall, engine: str, keys: Path | None, json: bool) -> list[str]:
    from ringcore.errors import RpcTimeoutError

    address = choose_engine(engine, keys)
    try:
        with address.connect() as client:
            values = call.on(client)
    except RpcTimeoutError as error:
        raise explained(error, address.local) from error
    return [as_json(value) for value in values.values()] if json else in_words(values)


def _methods(engine: str, keys: Path | None, timeout: float, rank: int | None, json: bool) -> list[str]:
    from ringcore.errors import InvalidRequestError

    if rank is not None:
        raise InvalidRequestError(
            f"rank={rank}: only calls to workers have one; leave it out", field="rank", value=rank
        )
    with choose_engine(engine, keys).connect() as client:
        methods = client.methods(timeout)
    return [as_json(one) for one in methods] if json else _table(methods)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _table(methods: list[RpcMethod]) -> list[str]:
    rows = [[one.target, one.scope, _EFFECTS[one.scope], f"{one.name}{one.signature}", one.summary] for one in methods]
    return table(["OF", "SCOPE", "EFFECT", "METHOD", ""], rows)
