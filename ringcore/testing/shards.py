"""Simulates independent replicas in parallel: shards of replicas, one process each."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ringcore.config import EngineConfig
from ringcore.errors import RingcoreError, error_from_wire, error_to_wire
from ringcore.executor.child_process import ChildProcess
from ringcore.executor.ring_memory import unnamed_file
from ringcore.executor.value_codec import decode_value, encode_value
from ringcore.host.log_histogram import LogHistogram
from ringcore.testing.hardware import Hardware
from ringcore.testing.prompts import PromptMaker
from ringcore.testing.replica import Records, Replica, ReplicaTotals
from ringcore.testing.speculator import FakeSpeculator
from ringcore.testing.step_cost import StepCost
from ringcore.testing.trace import Trace

__all__ = ["Shard", "ShardResult", "main", "run_shard", "run_shards"]

_RESULT = "result"  # the name of the inherited file


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A set of replicas, and the part of a trace that is routed to them."""

    config: EngineConfig
    cost: StepCost
    hardware: Hardware
    trace: Trace
    replica_of: np.ndarray  # [n] int64: of each request, 0 to num_replicas - 1
    num_replicas: int
    max_steps: int
    speculator: FakeSpeculator | None


@dataclass(frozen=True, slots=True)
class ShardResult:
    records: Records
    totals: list[ReplicaTotals]  # by replica


def run_shard(shard: Shard) -> ShardResult:
    """Simulates the shard's replicas one after the other, each from its first arrival to its last end."""
    trace, records = shard.trace, Records.empty(len(shard.trace))
    prompts = PromptMaker(shard.config.model.spec.vocab_size, len(trace) + len(trace.prefix_ids))
    totals = []
    for number in range(shard.num_replicas):
        replica = Replica(
            shard.config, shard.cost, shard.hardware, trace, prompts, records, shard.max_steps, shard.speculator
        )
        for index in np.flatnonzero(shard.replica_of == number).tolist():
            replica.run_until(float(trace.time_s[index]))
            replica.add(index)
            replica.ended.clear()
        totals.append(replica.finish())
    return ShardResult(records, totals)


def run_shards(shards: Sequence[Shard]) -> list[ShardResult]:
    """Runs all shards in parallel: the first in this process, each other one in a child process.

    Raises the error of a failed shard; `EngineDeadError` for a process that died.
    """
    with ExitStack() as stack:
        children = []
        for number, shard in enumerate(shards[1:], start=1):
            result_fd = unnamed_file(_RESULT)
            stack.callback(os.close, result_fd)
            entry = f"{__name__}:main"
            child = ChildProcess.start(f"simulation {number}", entry, _packed(shard), {_RESULT: result_fd})
            stack.callback(child.terminate)
            children.append((child, result_fd))
        first = run_shard(shards[0])
        return [first, *(_result_of(child, fd) for child, fd in children)]


def main(payload: bytes, fds: dict[str, int]) -> None:
    """The entry point of a shard's process."""
    result: object
    try:
        result = {"result": run_shard(_shard_of(_unpacked(payload)))}
    except RingcoreError as error:
        result = {"error": error_to_wire(error)}
    with open(fds[_RESULT], "wb") as sink:
        sink.write(_packed(result))


def _result_of(child: ChildProcess, result_fd: int) -> ShardResult:
    child.wait()
    if child.exit_code != 0:
        raise child.dead_error()
    with open(result_fd, "rb", closefd=False) as source:
        source.seek(0)
        value = _unpacked(source.read())
    if "error" in value:
        raise error_from_wire(value["error"])
    records = value["result"]["records"]
    records |= {"itl": LogHistogram(**records["itl"]), "refused": Counter(records["refused"])}
    return ShardResult(Records(**records), msgspec.convert(value["result"]["totals"], list[ReplicaTotals]))


def _shard_of(value: dict[str, Any]) -> Shard:
    return Shard(
        config=msgspec.convert(value["config"], EngineConfig),
        cost=msgspec.convert(value["cost"], StepCost),
        hardware=msgspec.convert(value["hardware"], Hardware),
        trace=Trace(**value["trace"]),
        replica_of=value["replica_of"],
        num_replicas=value["num_replicas"],
        max_steps=value["max_steps"],
        speculator=msgspec.convert(value["speculator"], FakeSpeculator | None),
    )


def _packed(value: object) -> bytes:
    return msgspec.msgpack.encode([bytes(part) for part in encode_value(value)])


def _unpacked(data: bytes) -> Any:
    return decode_value(msgspec.msgpack.decode(data, type=list[bytes]))
