"""Kernel warm-up: compiles the kernels of a model's steps while its weights are read, and initializes libraries.

The variants to compile are found by launch interception: dummy steps of a model of the same shapes but few layers, with
uninitialized weights, run through the real runner while every launch is recorded instead of executed
(`kernels.precompile`). Their results are meaningless and discarded. What was found is listed (`kernel_list`), and a
later start loads it while its model is built. A kernel that this misses, or all kernels where it fails, is compiled on
its first launch.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any, Self, cast

import msgspec
import torch

from ringcore.config import EngineConfig
from ringcore.distributed.parallel import TensorParallel
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kernels.launch.precompile import Variant, compile_variants, hash_compiler, intercept_launches
from ringcore.model_executor.arithmetic import arithmetic_of
from ringcore.model_executor.models import build_model, few_layers
from ringcore.model_executor.models.base import CausalLM
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.row_parameters import EVERY_PARAMETER
from ringcore.protocol.steps import NewRequest, SchedulerOutput
from ringcore.tracing import Tracer
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.device_launcher import DeviceLauncher
from ringcore.worker.runner.graph_capture import graph_sizes
from ringcore.worker.runner.kernel_tiles import searched_tiles
from ringcore.worker.runner.kv_caches import choose_backends
from ringcore.worker.runner.loaded_model import BuiltModel, LoadedModel
from ringcore.worker.runner.model_runner import ModelRunner
from ringcore.worker.start_up.kernel_list import KernelList
from ringcore.worker.start_up.memory_budget import planned_cache

__all__ = ["FewLayers", "KernelWarmUp", "has_room", "intercept_steps", "set_up_libraries", "warm_up_steps"]

_TIMEOUT_S = 120.0  # longer means that the thread hangs
_PROMPTS = (2, 16, 100, 1000)  # tokens: kernels depend on the length; Triton specializes on multiples of 16
_PREFIX = 16
# Of the warm-ups of this process. Only the first one's list is whole: what is compiled already is not found again.
_NUMBERS = count()
_log = logging.getLogger(__name__)


class KernelWarmUp:
    """A thread that compiles the kernels of a model's steps, started by the constructor.

    Kernels that an earlier start listed are loaded while the model is built. Where there is no list they are found once
    it is built, and listed.
    """

    def __init__(self, config: EngineConfig, platform: Platform, tp: TensorParallel) -> None:
        self._config, self._platform, self._tp = config, platform, tp
        self._dtype = platform.resolve_dtype(config.model.dtype, config.model.spec.dtype)
        self._is_first = next(_NUMBERS) == 0
        self._free_bytes = platform.free_memory_bytes()
        self._built: Future[BuiltModel] = Future()
        self._hashed: Future[None] = Future()
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="kernel warm-up", daemon=True)
        self._thread.start()

    def follow(self, built: BuiltModel) -> None:
        """Goes on with what needs the model, whose weights are not allocated yet."""
        self._built.set_result(built)

    def finish(self) -> float:
        """Waits for the thread; -> the seconds that it took. Without a model only what is listed is loaded."""
        self._built.cancel()
        self._thread.join(_TIMEOUT_S)
        if self._thread.is_alive():
            _log.warning("kernel warm-up exceeds %.0f s; kernels are compiled on their first launch", _TIMEOUT_S)
        return self._seconds

    def _run(self) -> None:
        started = time.monotonic()
        try:
            with ThreadPoolExecutor(2, "kernel warm-up") as pool:
                self._hashed = pool.submit(hash_compiler)
                libraries = pool.submit(lambda: set_up_libraries(self._config, self._built.result(), self._platform))
                listed = KernelList.of(self._config, self._tp, self._dtype, self._platform.device)
                if not self._load(listed):
                    built = self._built.result()
                    started = time.monotonic()
                    self._find(listed, built.weights_bytes)
                libraries.result()
        except CancelledError:
            pass  # no model was built, for a reason that its caller is told
        except Exception:  # only costs time: a missing kernel is compiled on its first launch
            _log.warning("kernel warm-up failed; kernels are compiled on their first launch", exc_info=True)
        finally:
            self._seconds = time.monotonic() - started

    def _load(self, listed: KernelList) -> bool:
        """Whether the kernels were listed, and are loaded."""
        started = time.monotonic()
        variants = listed.read()
        if variants is None:
            return False
        try:
            self._compile(variants)
        except Exception:
            _log.warning("the listed kernels cannot be loaded; those that are missing are found", exc_info=True)
            self._is_first = False  # those that were loaded will not be found
            self._write(listed, [])
            return False
        _log.info("%d kernels listed, loaded in %.2f s", len(variants), time.monotonic() - started)
        return True

    def _find(self, listed: KernelList, weights_bytes: int) -> None:
        started = time.monotonic()
        few = FewLayers.of(self._config, self._tp, self._dtype)
        if not has_room(few, weights_bytes, self._free_bytes):
            _log.info("no room for kernel warm-up beside the weights; kernels are compiled on their first launch")
            return
        variants = intercept_steps(few, self._platform, self._tp)
        gc.collect()  # reference cycles of the dummy runner hold device memory
        found_s = time.monotonic() - started
        compiled_s = self._compile(variants)
        _log.info("%d kernels found in %.2f s, compiled in %.2f s", len(variants), found_s, compiled_s)
        if self._is_first:
            self._write(listed, variants)

    def _compile(self, variants: Sequence[Variant]) -> float:
        num_threads = max(1, len(os.sched_getaffinity(0)) // self._tp.size)
        first = self._tp.rank * len(variants) // self._tp.size
        self._hashed.result()
        return compile_variants(variants, self._platform.device, num_threads, first)

    def _write(self, listed: KernelList, variants: Sequence[Variant]) -> None:
        try:
            listed.write(variants)
        except OSError as error:
            _log.warning("the kernels are not listed, and the next start finds them again: %s", error)


@dataclass(frozen=True, slots=True)
class FewLayers:
    """The first layers of a model, enough for one of every kind, without weights."""

    config: EngineConfig
    model: CausalLM
    dtype: str

    @classmethod
    def of(cls, config: EngineConfig, tp: TensorParallel, dtype: str) -> Self:
        # User code is not called in a dummy run, and there are no CUDA graphs, since nothing is executed.
        few = replace(config.model, spec=few_layers(config.model.spec), logits_processors=[])
        config = replace(config, model=few, device=replace(config.device, enforce_eager=True))
        device = torch.device("cuda")
        model = build_model(
            few.spec,
            tp.detached(),
            TORCH_DTYPES[dtype],
            few.context_len,
            expert_parallel=config.parallel.expert_parallel,
            redundant_experts=config.parallel.redundant_experts,
            arithmetic=arithmetic_of(config.model.deterministic, device, searched_tiles(config.device, device)),
        )
        return cls(config, model, dtype)

    @property
    def loaded(self) -> LoadedModel:
        return LoadedModel(self.model, self.dtype, weights_bytes=0, load_s=0.0)


def has_room(few: FewLayers, weights_bytes: int, free_bytes: int) -> bool:
    """Whether twice the memory of the few layers is free beside the weights."""
    return weights_bytes + 2 * sum(weight.nbytes for weight in few.model.weights()) <= free_bytes


@torch.inference_mode()
def set_up_libraries(config: EngineConfig, built: BuiltModel, platform: Platform) -> None:
    """One-time initialization of cuBLAS and of the attention libraries."""
    if platform.device.type == "cuda":
        torch.cuda.set_device(platform.device)
    rows = torch.zeros(16, 16, dtype=TORCH_DTYPES[built.dtype], device=platform.device)
    torch.nn.functional.linear(rows, rows)
    plan = planned_cache(config, built.kv_cache_spec(config.cache))
    layers, is_invariant = built.model.attention_layers, config.model.deterministic
    for backend in choose_backends(config.device.attention_backend, plan, layers, platform, is_invariant):
        backend.warm_up(config.scheduler.token_budget, config.model.context_len, platform.device)


@torch.inference_mode()
def intercept_steps(few: FewLayers, platform: Platform, tp: TensorParallel) -> list[Variant]:
    """The kernel variants that `warm_up_steps` would launch, each once. Its model is bound here."""
    if platform.device.type == "cuda":
        torch.cuda.set_device(platform.device)
    config, model, loaded = few.config, few.model, few.loaded
    with intercept_launches() as intercepted:
        weights = {
            weight.name: torch.empty(weight.shape, dtype=weight.dtype, device=platform.device)
            for weight in model.weights()
        }
        model.bind(weights)
        plan = planned_cache(config, loaded.kv_cache_spec(config.cache))
        plan = msgspec.structs.replace(plan, num_blocks=2)  # the null block, and one that holds every token
        memory = cast(Platform, _TorchMemoryPlatform(platform))
        is_output_rank = tp.rank == config.parallel.layout.tensor_rank_of(config.parallel.layout.output_rank)
        runner = ModelRunner(config, loaded, plan, memory, is_output_rank, DeviceLauncher, Tracer(), may_draft=False)
        for step in warm_up_steps(config, [group.spec.block_size for group in plan.groups]):
            runner.execute(step)
        platform.synchronize()
    return list(intercepted.values())


class _TorchMemoryPlatform:
    """A platform that allocates from torch: the arenas belong to the real model."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    def allocate(self, num_bytes: int, tag: str) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._platform.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


# ---------------------------------------------------------------------------------------------------------------
# The steps.

_GREEDY, _SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
_ADJUSTED = SamplingParams(temperature=1.0, repetition_penalty=1.1, logit_bias={0: 1.0}, allowed_token_ids=[0])


def warm_up_steps(config: EngineConfig, block_sizes: Sequence[int]) -> Iterator[SchedulerOutput]:
    """Dummy steps: prompts of several lengths, one after a cached prefix, one in a mixed step with a decoding row; then
    decoding steps of every graph size. block_sizes: by KV cache group. All tokens are in block 1."""

    def prompt(row: int, num_tokens: int, params: SamplingParams, num_computed: int = 0) -> NewRequest:
        blocks = [int_array([1] * -(-(num_tokens + 1) // size)) for size in block_sizes]  # room for the next token too
        ids = int_array([0] * num_tokens)
        return NewRequest(row, ids, num_tokens, num_computed, num_computed, blocks, params, 1, [0])

    longest = min(config.model.context_len - 1, config.scheduler.token_budget)
    if longest < 1:
        return
    max_rows, steps = config.scheduler.max_num_seqs, _Steps()
    for num_tokens, params in product(_PROMPTS, (_GREEDY, _SAMPLED, EVERY_PARAMETER)):
        if num_tokens <= longest:
            yield steps.fresh([prompt(0, num_tokens, params)], [num_tokens])
    if longest >= 2 * _PREFIX:
        yield steps.fresh([prompt(0, 2 * _PREFIX, _SAMPLED, _PREFIX)], [_PREFIX])
        if max_rows > 1:
            yield steps.step([prompt(1, _PREFIX, _SAMPLED)], [0, 1], [1, _PREFIX])
    yield steps.fresh([prompt(0, 1, _ADJUSTED)], None)
    smallest, *others = graph_sizes(max_rows)[:longest]
    sizes = [*reversed(others), smallest]
    yield steps.fresh([prompt(row, 1, _SAMPLED) for row in range(sizes[0])], None)
    for size in sizes[1:]:
        yield steps.step([], range(size), None)


class _Steps:
    """Builds numbered steps, and tracks the rows in use."""

    def __init__(self) -> None:
        self._number = 0
        self._taken: list[int] = []

    def fresh(self, new: list[NewRequest], num_tokens: list[int] | None) -> SchedulerOutput:
        """A step of new requests only; all earlier ones have finished."""
        finished, self._taken = self._taken, []
        return self.step(new, [request.row for request in new], num_tokens, finished)

    def step(
        self, new: list[NewRequest], rows: Sequence[int], num_tokens: list[int] | None, finished: Sequence[int] = ()
    ) -> SchedulerOutput:
        """num_tokens: of each row; None: one each."""
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
