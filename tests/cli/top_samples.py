"""Samples of engines that do not exist, and a source that hands them out."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ringcore.cli.top.sample import Sample, WorkerSample
from ringcore.cli.top.source import Action, Choice
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.protocol.introspection import (
    BlockMap,
    EngineAbout,
    EngineSnapshot,
    RequestList,
    RequestReport,
    Spread,
    StepReport,
)
from ringcore.protocol.messages import EngineHealth

HOSTILE = "\x1b[31mred\x1b]0;title\x07 [bold]markup[/bold] [/] \u202eabc\n\r\t\x00 \u0301 日本語 " + "x" * 500
GIB = 2**30


def request(number: int = 1, **fields) -> RequestReport:
    base = RequestReport(
        request_id=f"request-{number}",
        state="running",
        age_s=number * 7.3,
        waiting_s=None,
        first_scheduled_s=0.12,
        num_prompt_tokens=100 * number,
        num_generated_tokens=12,
        max_generated_tokens=256,
        num_computed_tokens=100,
        num_cached_tokens=64,
        num_blocks=7 * number,
        priority=0,
        num_preemptions=0,
    )
    return msgspec.structs.replace(base, **fields)


def requests(oldest=(), **numbers) -> RequestList:
    zeros = dict.fromkeys(("running", "waiting", "preempted", "held", "compiling"), 0)
    return RequestList(zeros | numbers, list(oldest))


def blocks(cells, per_cell: int = 1) -> BlockMap:
    sums = [sum(column) for column in zip(*cells, strict=True)]
    return BlockMap(sum(sums), *sums, per_cell, cells)


def spread(base: float) -> Spread:
    return Spread(base, 1.3 * base, 2 * base, 5.5 * base)


def steps(**fields) -> StepReport:
    parts = {
        "step": 5.1e-3,
        "schedule": 48e-6,
        "launch": 31e-6,
        "wait": 4.9e-3,
        "update": 65e-6,
        "send": 22e-6,
    }
    return StepReport(1024, 5.2, 41_000.0, 6_120.0, 196.0, {name: spread(value) for name, value in parts.items()})


def about(**fields) -> EngineAbout:
    base = EngineAbout(
        model="/models/Qwen3-8B",
        device="cuda",
        age_s=8_000.0,
        pids={"engine": 4711, "worker 0": 4712, "worker 1": 4713},
        world_size=2,
        num_blocks=2048,
        block_size=16,
        max_model_len=32_768,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        steps_in_flight=2,
        scheduling_policy="fcfs",
    )
    return msgspec.structs.replace(base, **fields)


def snapshot(**fields) -> EngineSnapshot:
    cells = [(0, 0, 1, 3)] * 80 + [(0, 1, 3, 0)] * 270 + [(1, 3, 0, 0)] * 70 + [(4, 0, 0, 0)] * 92
    oldest = [
        request(number, num_preemptions=number // 14, request_id=f"chatcmpl-{7919 * number:08x}#{number}")
        for number in range(20, 0, -1)
    ]
    oldest[3] = msgspec.structs.replace(oldest[3], state="preempted", waiting_s=0.8, num_blocks=0)
    oldest[9:] = [
        msgspec.structs.replace(one, state="waiting", waiting_s=one.age_s, num_blocks=0, num_generated_tokens=0)
        for one in oldest[9:]
    ]
    base = EngineSnapshot(
        about=about(),
        health=EngineHealth("ready", 88_000, 0.004, 0.0031, 14.2, 32, 204),
        requests=requests(oldest, running=32, waiting=204, preempted=1),
        blocks=blocks(cells, 4),
        steps=steps(),
        taken_s=1000.0,
        cpu_s=100.0,
        resident_bytes=410 << 20,
        num_steps=88_000,
        num_scheduled_tokens=20_000_000,
        num_generated_tokens=2_400_000,
        num_preemptions=17,
        num_prefix_hit_tokens=6_000_000,
        num_prefix_query_tokens=14_000_000,
    )
    return msgspec.structs.replace(base, **fields)


def worker(rank: int, cpu_s: float = 50.0, has_gpu: bool = True) -> WorkerSample:
    usage = {"rank": rank, "num_steps": 88_000, "resident_bytes": 3.2 * GIB, "cpu_s": cpu_s}
    gpu = {"gpu_percent": 91.0, "gpu_used_bytes": 71.5 * GIB, "gpu_total_bytes": 79.6 * GIB, "gpu_power_w": 612.0}
    memory = {"weights_bytes": 7.6 * GIB, "kv_cache_bytes": 55 * GIB, "free_bytes": 8 * GIB}
    return WorkerSample(rank, usage | (gpu if has_gpu else {}), memory)


def sample(has_gpu: bool = True, **fields) -> Sample:
    workers = [worker(rank, has_gpu=has_gpu) for rank in range(2)]
    return Sample(snapshot(**fields), workers, None, "cuda" if has_gpu else "cpu")


def later(before: Sample, seconds: float = 1.0, num_tokens: int = 6000, **fields) -> Sample:
    """The same engine, some seconds after."""
    old = before.engine
    engine = msgspec.structs.replace(
        old,
        taken_s=old.taken_s + seconds,
        cpu_s=old.cpu_s + 0.62 * seconds,
        num_steps=old.num_steps + round(196 * seconds),
        num_generated_tokens=old.num_generated_tokens + num_tokens,
        num_scheduled_tokens=old.num_scheduled_tokens + 7 * num_tokens,
        num_prefix_query_tokens=old.num_prefix_query_tokens + 10_000,
        num_prefix_hit_tokens=old.num_prefix_hit_tokens + 6_100,
        **fields,
    )
    workers = [
        msgspec.structs.replace(one, usage=one.usage | {"cpu_s": one.usage["cpu_s"] + 0.98 * seconds})
        for one in before.workers
    ]
    return Sample(engine, workers, None, before.device)


class FakeSource:
    """Hands out its samples one by one, the last one again and again; raises those that are errors."""

    def __init__(self, *samples: Sample | RingcoreError) -> None:
        self.samples = list(samples)
        self.actions: list[Action] = []
        self.answer: object = None
        self.is_closed = False
        self.num_dumps = 0

    def sample(self) -> Sample:
        found = self.samples.pop(0) if len(self.samples) > 1 else self.samples[0]
        if isinstance(found, RingcoreError):
            raise found
        return found

    def act(self, action: Action) -> object:
        self.actions.append(action)
        if isinstance(self.answer, RingcoreError):
            raise self.answer
        return self.answer

    def dump(self) -> Path:
        self.num_dumps += 1
        if isinstance(self.answer, OSError):
            raise self.answer
        return Path("dump.json")

    def close(self) -> None:
        self.is_closed = True


def choice(*sources: FakeSource, name: str = "Qwen3-8B") -> Choice:
    """Connects to one source after the other; where none is left there is no engine."""
    left = list(sources)

    def connect() -> FakeSource:
        if not left:
            raise EngineDeadError("nothing listens at this address", process="engine")
        return left.pop(0)

    return Choice(name, "pid 4711, ready", connect)
