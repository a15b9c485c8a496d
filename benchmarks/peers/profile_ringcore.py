"""ringcore's engine in this process, and which kernels its steps run."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.peers.gpu_loops import OFFLINE_TEMPERATURE, shared_workload
from benchmarks.peers.gpu_ringcore import engine_options
from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import facts
from ringcore.config import EngineConfig
from ringcore.engine_core.core import EngineCore
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol import EngineCoreRequest

PACKAGES = ("ringcore", "torch", "triton", "numpy")
WARM_STEPS = 16  # of decoding, before any is looked at
WARM_PROMPT_STEPS = 3
MOST_PLACES = 9  # of a layer's kernels, attention being the first
NEW_TOKENS = 1024  # more than are looked at: the first requests decode while the prompts of others are computed

Events = list[tuple[str, float, float]]


class ProfiledRingcore:
    """Commands: load, profile, profile_prompts, profile_offline, profile_shared."""

    def __init__(self) -> None:
        self._core: EngineCore | None = None
        self._ids = count()
        self._draw = random.Random(0)
        self._waiting: set[str] = set()

    def load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        began_s = time.perf_counter()
        options = {**engine_options(settings), "executor": "uniproc"}
        self._core = EngineCore(EngineConfig.from_options(model=model, **options))
        self._vocab_size = json.loads((Path(model) / "config.json").read_text())["vocab_size"]
        self._on_gpu = settings["device"] == "cuda"
        return facts(PACKAGES, construct_s=time.perf_counter() - began_s)

    def profile(self, batch: int, prompt_tokens: int, num_steps: int, by_place: bool = False) -> dict[str, Any]:
        """Decode steps of `batch` requests: microseconds a step by the clock without the profiler, and with it the
        device's span, the time of it in which any kernel ran, and (name, launches, microseconds, exclusive ones) a step
        by kernel. by_place: and by its place in a layer, see `placed`."""
        self._begin(batch, prompt_tokens)
        found = self._looked_at(num_steps, placed if by_place else list)
        self._finish()
        return found

    def profile_prompts(self, prompt_tokens: int, num_steps: int) -> dict[str, Any]:
        """The same of steps that have nothing but prompts of `prompt_tokens`, as many as a step has room for."""
        a_step = max(1, self._engine.ready.max_num_batched_tokens // prompt_tokens)
        self._waiting = set()
        # Twice what is looked at, and what is under way when the last step looked at has ended.
        for _ in range(a_step * 2 * (WARM_PROMPT_STEPS + num_steps)):
            self._ask(prompt_tokens, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
        for _ in range(WARM_PROMPT_STEPS):
            self._engine.step()
        found = self._looked_at(num_steps)
        self._finish()
        return found

    def profile_offline(self, lengths: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """The same of all of a batch, from its first request to its last token; lengths: of each request, prompt tokens
        and new tokens."""
        self._ask_offline(lengths)
        clock_us = _clocked_us(self._drain)
        self._ask_offline(lengths)
        return _summary(clock_us, self._profiled(self._drain), 1)

    def profile_shared(self, num_requests: int) -> dict[str, Any]:
        """The same of requests that begin with the same tokens. The first load warms up; each has a prefix of its
        own, so that none is found in the cache."""
        self._ask_shared(num_requests, turn=0)
        self._drain()
        self._ask_shared(num_requests, turn=1)
        clock_us = _clocked_us(self._drain)
        self._ask_shared(num_requests, turn=2)
        return _summary(clock_us, self._profiled(self._drain), 1)

    def close(self) -> None:
        if self._core is not None:
            self._core.shutdown()

    @property
    def _engine(self) -> EngineCore:
        assert self._core is not None, "load comes first"
        return self._core

    def _begin(self, batch: int, prompt_tokens: int) -> None:
        """All requests decode when this returns, and have done so for a while."""
        self._waiting = set()
        for _ in range(batch):
            self._ask(prompt_tokens, SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True))
        waiting = set(self._waiting)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step().outputs if output.new_token_ids}
        for _ in range(WARM_STEPS):
            self._engine.step()

    def _ask_offline(self, lengths: Sequence[tuple[int, int]]) -> None:
        for prompt_tokens, new in lengths:
            params = SamplingParams(temperature=OFFLINE_TEMPERATURE, max_tokens=new, ignore_eos=True)
            self._ask(prompt_tokens, params)

    def _ask_shared(self, num_requests: int, turn: int) -> None:
        for prompt, new in zip(*shared_workload(num_requests, turn, self._vocab_size), strict=True):
            self._send(prompt, SamplingParams(temperature=0, max_tokens=new, ignore_eos=True))

    def _ask(self, prompt_tokens: int, params: SamplingParams) -> None:
        self._send(self._draw.choices(range(self._vocab_size), k=prompt_tokens), params)

    def _send(self, prompt: list[int], params: SamplingParams) -> None:
        request = EngineCoreRequest(f"request-{next(self._ids)}", prompt, params, 0.0)
        self._waiting.add(request.request_id)
        self._engine.add_request(request)

    def _looked_at(self, num_steps: int, named: Callable[[Events], Events] = list) -> dict[str, Any]:
        def steps() -> None:
            for _ in range(num_steps):
                self._engine.step()

        return _summary(_clocked_us(steps), named(self._profiled(steps)), num_steps)

    def _profiled(self, work: Callable[[], None]) -> Events:
        """(name, when it began in microseconds, for how many) of each kernel or copy on the device, in order."""
        import torch
        from torch.profiler import ProfilerActivity

        activity = ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU
        wanted = torch.autograd.DeviceType.CUDA if self._on_gpu else torch.autograd.DeviceType.CPU
        with torch.profiler.profile(activities=[activity]) as profiler:
            work()
            if self._on_gpu:
                torch.cuda.synchronize()
        events = [
            (event.name, event.time_range.start, event.time_range.elapsed_us())
            for event in profiler.events() or ()
            if event.device_type == wanted
        ]
        if not events:
            raise RuntimeError("the profiler saw nothing on the device")
        return sorted(events, key=lambda event: event[1])

    def _finish(self) -> None:
        self._engine.abort(self._waiting)
        self._drain()

    def _drain(self) -> None:
        while self._engine.has_unfinished or self._engine.num_in_flight:
            self._engine.step()


def _clocked_us(work: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    work()
    return (time.perf_counter() - began_s) * 1e6


def _summary(clock_us: float, events: Events, num_steps: int) -> dict[str, Any]:
    """A step's, of both."""
    span_us, exclusive_us = spans(events)
    launches: dict[str, float] = defaultdict(float)
    durations_us: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for (name, _, duration_us), alone_us in zip(events, exclusive_us, strict=True):
        launches[name] += 1 / num_steps
        before = durations_us[name]
        durations_us[name] = before[0] + duration_us / num_steps, before[1] + alone_us / num_steps
    rows = [(name, launches[name], *us) for name, us in durations_us.items()]
    return {
        "clock_us": clock_us / num_steps,
        "span_us": span_us / num_steps,
        "busy_us": sum(exclusive_us) / num_steps,
        "kernels": sorted(rows, key=lambda row: -row[3]),
    }


def placed(events: Events) -> Events:
    """With how many kernels it comes behind the last kernel of attention as a part of each name: of a layer's two norms
    one is behind o, the other behind down. What is no layer's has a name alone."""
    named, place = [], MOST_PLACES
    for name, *times in events:
        place = 0 if "attention" in name else place + 1
        named.append((f"{name} +{place}" if place < MOST_PLACES else name, *times))
    return named


def spans(events: Events) -> tuple[float, list[float]]:
    """(from the first beginning to the last end, of each the time behind the end of all before) in microseconds; of
    events in the order of their beginnings. Kernels overlap where one is launched before the one before it has ended:
    what they wait counts for the one that is waited for."""
    exclusive, until = [], events[0][1]
    for _, began, duration in events:
        ended = began + duration
        exclusive.append(max(0.0, ended - max(began, until)))
        until = max(until, ended)
    return until - events[0][1], exclusive


if __name__ == "__main__":
    profiled = ProfiledRingcore()
    try:
        serve(
            {
                "load": profiled.load,
                "profile": profiled.profile,
                "profile_prompts": profiled.profile_prompts,
                "profile_offline": profiled.profile_offline,
                "profile_shared": profiled.profile_shared,
            }
        )
    finally:
        profiled.close()
