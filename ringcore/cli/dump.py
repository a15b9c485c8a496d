"""`ringcore dump`: an engine's whole state as a JSON file, written by the command, so also of an engine that hangs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from ringcore.cli.engines import ENGINE_HELP, KEYS_HELP, choose_engine
from ringcore.errors import RingcoreError, RpcTimeoutError

if TYPE_CHECKING:
    from ringcore.cli.engines import EngineAddress
    from ringcore.front_end.admin_client import AdminClient

__all__ = ["dump", "write_dump"]

_CALL_S = 5.0
_SIZES = 1000, 4096, 1024  # requests, cells of the block map, steps: all that there is
_STACK_S = 1.0
_OF_WORKERS = ("stats", "memory", "health", "stack")


def dump(
    engine: Annotated[str | None, typer.Argument(help=ENGINE_HELP)] = None,
    file: Annotated[Path | None, typer.Argument(help="default: ringcore-dump-NAME-TIME.json in this folder")] = None,
    keys: Annotated[Path | None, typer.Option(help=KEYS_HELP)] = None,
) -> None:
    """Writes an engine's whole state as JSON: health, requests, KV cache blocks, the last 1024 steps, memory, and the
    Python stacks of every process; no prompt and no generated text.

    An engine that does not answer is dumped as far as can be seen without it: the state and the stacks of its
    processes. The file then says what is missing, under "errors".

    Examples:

    \b
      ringcore dump 4242
      ringcore dump SmolLM2-135M state.json
      ringcore dump tcp://127.0.0.1:5600 --keys ./admin-keys
    """
    print(write_dump(choose_engine(engine, keys), file))


def write_dump(address: EngineAddress, file: Path | None = None) -> Path:
    """Raises OSError. The file is readable by this user alone."""
    found = _state_of(address)
    path = file or Path(f"ringcore-dump-{_file_name(address.name)}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        json.dump(found, out, indent=1)
        out.write("\n")
    return path


def _file_name(name: str) -> str:
    return "".join(one if one.isascii() and (one.isalnum() or one in "-_.") else "_" for one in name)[:60]


def _state_of(address: EngineAddress) -> dict[str, Any]:
    """What each call tells, by its name; those that fail are in "errors"."""
    found: dict[str, Any] = {"engine": address.name, "written": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    errors: dict[str, str] = {}
    try:
        with address.connect() as client:
            for name, call in _calls(client).items():
                try:
                    found[name] = call()
                except RpcTimeoutError as error:
                    errors[name] = f"{error.message}; what comes after was not asked for"
                    break
                except RingcoreError as error:
                    errors[name] = error.message
    except RingcoreError as error:
        errors["connect"] = error.message
    if address.local is not None and address.local.pid is not None:
        found["processes"] = _processes(address.local.pid)
    return found | {"errors": errors}


def _calls(client: AdminClient) -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {
        "snapshot": lambda: client.call_engine("snapshot", _SIZES, timeout=_CALL_S),
        "stack": lambda: client.call_engine("stack", timeout=_CALL_S),
    }
    of_workers = {f"workers_{name}": partial(client.collective_rpc, name, timeout=_CALL_S) for name in _OF_WORKERS}
    return calls | of_workers


def _processes(pid: int) -> list[dict[str, Any]]:
    """The engine process and its children, as the kernel sees them, with their stacks, asked all at once."""
    try:
        engine = psutil.Process(pid)
        family = [engine, *engine.children(recursive=True)]
    except psutil.Error:
        return []
    with ThreadPoolExecutor(len(family)) as pool:
        return [one for one in pool.map(_process, family) if one is not None]


def _process(process: psutil.Process) -> dict[str, Any] | None:
    from ringcore.executor.foreign_stacks import stacks_of

    try:
        with process.oneshot():
            figures = {
                "pid": process.pid,
                "name": process.name(),
                "status": process.status(),
                "cpu_s": sum(process.cpu_times()[:2]),
                "resident_bytes": process.memory_info().rss,
                "num_threads": process.num_threads(),
                "num_fds": process.num_fds(),
            }
    except psutil.Error:
        return None
    return figures | {"stacks": stacks_of(process.pid, _STACK_S)}
