"""Compiles the kernels of a model's steps while its weights are read, and has libraries load theirs.

What a step launches is asked of the step: a model of the same shapes and few layers, with memory in place of weights,
is taken through the real runner, whose launches are caught (`kernels.precompile`). It says nothing about results and is
thrown away; a kernel that it misses, or all where it fails, is compiled as it is met, one after the other.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import Any, cast

import msgspec
import torch

from ringcore.config import EngineConfig
from ringcore.distributed.parallel import TensorParallel
from ringcore.kernels.precompile import Variant, compile_variants, intercept_launches
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.model_executor.models import model_class
from ringcore.model_executor.models.base import CausalLM
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import NewRequest, SchedulerOutput
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.cuda_graphs import graph_sizes
from ringcore.worker.runner.kv_caches import choose_backends
from ringcore.worker.runner.model_runner import LoadedModel, ModelRunner
from ringcore.worker.start_up.memory_budget import planned_cache

__all__ = ["KernelsAhead", "RunnerFactory", "catch_steps", "has_room", "set_up_libraries", "steps_of_all_kinds"]

RunnerFactory = Callable[[EngineConfig, LoadedModel, KVCacheConfig, Platform, int], ModelRunner]

_PATIENCE_S = 120.0  # by then something waits for what does not run
_PROMPTS = (2, 16, 100, 1000)  # tokens: kernels are chosen by length, and Triton tells multiples of 16 from others
_PREFIX = 16
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_log = logging.getLogger(__name__)


class KernelsAhead:
    """A thread that catches and compiles, from construction on."""

    def __init__(
        self, config: EngineConfig, platform: Platform, tp: TensorParallel, dtype: str, runner: RunnerFactory
    ) -> None:
        """dtype: that the model computes in. runner: makes the runner whose steps are to be launched later."""
        self._arguments = config, platform, tp, dtype, runner
        self._free_bytes = platform.free_memory_bytes()
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="kernels ahead", daemon=True)
        self._thread.start()

    def finish(self) -> float:
        """Waits for the end; the seconds that the thread took."""
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            _log.warning("the kernels are not compiled after %.0f s; they are compiled as they are met", _PATIENCE_S)
        return self._seconds

    def _run(self) -> None:
        started = time.monotonic()
        config, platform, tp, dtype, runner = self._arguments
        try:
            if not has_room(config, tp, dtype, self._free_bytes):
                _log.info("no room to look for kernels beside the weights; they are compiled as they are met")
                return
            with ThreadPoolExecutor(1, "libraries ahead") as beside:
                libraries = beside.submit(set_up_libraries, config, platform, tp, dtype)
                variants = catch_steps(config, platform, tp, dtype, runner)
                gc.collect()  # what was caught with may hold itself, and memory
                caught_s = time.monotonic() - started
                num_threads = max(1, len(os.sched_getaffinity(0)) // tp.size)
                first = tp.rank * len(variants) // tp.size
                compiled_s = compile_variants(variants, platform.device, num_threads, first)
                libraries.result()
        except Exception:  # nothing that a step needs is missing because of that
            _log.warning("the kernels could not be compiled ahead; they are compiled as they are met", exc_info=True)
        else:
            _log.info("%d kernels found in %.2f s, compiled in %.2f s", len(variants), caught_s, compiled_s)
        finally:
            self._seconds = time.monotonic() - started


def has_room(config: EngineConfig, tp: TensorParallel, dtype: str, free_bytes: int) -> bool:
    """Whether the weights leave twice the memory that the few layers take."""
    whole, few = (_weights_bytes(c, tp, dtype) for c in (config, _few_layers(config)))
    return whole + 2 * few <= free_bytes


def _weights_bytes(config: EngineConfig, tp: TensorParallel, dtype: str) -> int:
    return sum(weight.nbytes for weight in _without_weights(config, tp.detached(), dtype).weights())


def _without_weights(config: EngineConfig, tp: TensorParallel, dtype: str) -> CausalLM:
    spec = config.model.spec
    return model_class(spec.architecture)(spec, tp, _DTYPES[dtype], config.model.context_len)


@torch.inference_mode()
def set_up_libraries(config: EngineConfig, platform: Platform, tp: TensorParallel, dtype: str) -> None:
    """What attention's libraries do once. Arguments: see `KernelsAhead`."""
    if platform.device.type == "cuda":
        torch.cuda.set_device(platform.device)
    model = _without_weights(config, tp.detached(), dtype)
    plan = planned_cache(config, LoadedModel(model, dtype, 0, 0.0).kv_cache_spec(config.cache.block_size))
    for backend in choose_backends(config.device.attention_backend, plan, model.attention_layers, platform):
        backend.warm_up(config.scheduler.token_budget, config.model.context_len, platform.device)


@torch.inference_mode()
def catch_steps(
    config: EngineConfig, platform: Platform, tp: TensorParallel, dtype: str, make_runner: RunnerFactory
) -> list[Variant]:
    """What steps of many kinds and sizes would have compiled, each kernel once. Arguments: see `KernelsAhead`."""
    if platform.device.type == "cuda":
        torch.cuda.set_device(platform.device)
    config = _few_layers(config)
    model = _without_weights(config, tp.detached(), dtype)
    with intercept_launches() as caught:
        weights = {
            weight.name: torch.empty(weight.shape, dtype=weight.dtype, device=platform.device)
            for weight in model.weights()
        }
        model.bind(weights)
        loaded = LoadedModel(model, dtype, weights_bytes=0, load_s=0.0)
        plan = planned_cache(config, loaded.kv_cache_spec(config.cache.block_size))
        plan = msgspec.structs.replace(plan, num_blocks=2)  # the null block and one in which every token lies
        runner = make_runner(config, loaded, plan, cast(Platform, _Plain(platform)), tp.rank)
        for step in steps_of_all_kinds(config, [group.spec.block_size for group in plan.groups]):
            runner.execute(step)
        platform.synchronize()
    return list(caught.values())


def _few_layers(config: EngineConfig) -> EngineConfig:
    """The first layers, as many as it takes to have one of every kind; and no graphs, which nothing could run."""
    spec = config.model.spec
    kinds = [spec.sliding_windows.get(index) for index in range(spec.num_layers)]
    num_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
    windows = {index: window for index, window in spec.sliding_windows.items() if index < num_layers}
    few = msgspec.structs.replace(spec, num_layers=num_layers, sliding_windows=windows)
    model = replace(config.model, spec=few, logits_processors=[])  # a user's code is not called for this
    return replace(config, model=model, device=replace(config.device, enforce_eager=True))


class _Plain:
    """A platform whose pages are torch's: those in its arena are the model's own."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def allocate(self, num_bytes: int, tag: str) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._platform.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


# ---------------------------------------------------------------------------------------------------------------
# The steps.

_GREEDY, _DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
_FILTERED = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.1, min_tokens=1, logprobs=1)
_ADJUSTED = SamplingParams(temperature=1.0, repetition_penalty=1.1, logit_bias={0: 1.0}, allowed_token_ids=[0])


def steps_of_all_kinds(config: EngineConfig, block_sizes: Sequence[int]) -> Iterator[SchedulerOutput]:
    """Prompts of several lengths, one behind a cached prefix, one beside a row that decodes; then decoding steps of
    every size that has a graph. block_sizes: by KV cache group. All tokens lie in block 1."""

    def prompt(row: int, num_tokens: int, params: SamplingParams, num_computed: int = 0) -> NewRequest:
        blocks = [int_array([1] * -(-(num_tokens + 1) // size)) for size in block_sizes]  # the next token's too
        ids = int_array([0] * num_tokens)
        return NewRequest(row, ids, num_tokens, num_computed, num_computed, blocks, params, 1, [0])

    longest = min(config.model.context_len - 1, config.scheduler.token_budget)
    if longest < 1:
        return
    max_rows, steps = config.scheduler.max_num_seqs, _Steps()
    for num_tokens, params in product(_PROMPTS, (_GREEDY, _DRAWN, _FILTERED)):
        if num_tokens <= longest:
            yield steps.fresh([prompt(0, num_tokens, params)], [num_tokens])
    if longest >= 2 * _PREFIX:
        yield steps.fresh([prompt(0, 2 * _PREFIX, _DRAWN, _PREFIX)], [_PREFIX])
        if max_rows > 1:
            yield steps.step([prompt(1, _PREFIX, _DRAWN)], [0, 1], [1, _PREFIX])
    yield steps.fresh([prompt(0, 1, _ADJUSTED)], None)
    smallest, *others = graph_sizes(max_rows)[:longest]
    sizes = [*reversed(others), smallest]
    yield steps.fresh([prompt(row, 1, _DRAWN) for row in range(sizes[0])], None)
    for size in sizes[1:]:
        yield steps.step([], range(size), None)


class _Steps:
    """Numbers steps, and knows which rows are taken."""

    def __init__(self) -> None:
        self._number = 0
        self._taken: list[int] = []

    def fresh(self, new: list[NewRequest], num_tokens: list[int] | None) -> SchedulerOutput:
        """A step of new requests alone: all before them have finished."""
        finished, self._taken = self._taken, []
        return self.step(new, [request.row for request in new], num_tokens, finished)

    def step(
        self, new: list[NewRequest], rows: Sequence[int], num_tokens: list[int] | None, finished: Sequence[int] = ()
    ) -> SchedulerOutput:
        """num_tokens: of each row; None: one."""
        self._taken += [request.row for request in new]
        self._number += 1
        return SchedulerOutput(
            step=self._number - 1,
            num_steps=1,
            finished_rows=int_array(finished),
            new_requests=new,
            new_blocks=[],
            rows=int_array(rows),
            num_scheduled_tokens=None if num_tokens is None else int_array(num_tokens),
            num_tokens=len(rows) if num_tokens is None else sum(num_tokens),
        )
