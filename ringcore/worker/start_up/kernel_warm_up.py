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
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Self, cast

import msgspec
import torch

from ringcore.config import EngineConfig
from ringcore.distributed.parallel import TensorParallel
from ringcore.errors import ModelLoadError
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kernels.launch.compile_processes import CompileProcesses
from ringcore.kernels.launch.precompile import KernelCompiler, Variant, hash_compiler, intercept_launches
from ringcore.model_executor.arithmetic import arithmetic_of
from ringcore.model_executor.models import build_model, few_layers
from ringcore.model_executor.models.base import CausalLM
from ringcore.tracing import Tracer
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.device_launcher import DeviceLauncher
from ringcore.worker.runner.kernel_tiles import searched_tiles
from ringcore.worker.runner.kv_caches import choose_backends
from ringcore.worker.runner.loaded_model import BuiltModel, LoadedModel
from ringcore.worker.runner.model_runner import ModelRunner
from ringcore.worker.start_up.compilers import drop_compilers, num_compilers, taken_compilers
from ringcore.worker.start_up.kernel_list import KernelList
from ringcore.worker.start_up.memory_budget import planned_cache
from ringcore.worker.start_up.warm_up_steps import warm_up_steps

__all__ = ["FewLayers", "KernelWarmUp", "has_room", "intercept_steps", "set_up_libraries"]

_TIMEOUT_S = 120.0  # longer means that the thread hangs
# Of the warm-ups of this process. Only the first one's list is whole: what is compiled already is not found again.
_NUMBERS = count()
_log = logging.getLogger(__name__)


class KernelWarmUp:
    """A thread that compiles the kernels of a model's steps, started by the constructor.

    Kernels that an earlier start listed are loaded while the model is built. Where there is no list they are found
    first, and listed: to compile them takes longer than to build the model and to read its weights.
    """

    def __init__(self, config: EngineConfig, platform: Platform, tp: TensorParallel, num_local_ranks: int = 1) -> None:
        """Returns when kernels are found, or are listed: the model's construction would hold up the thread, by the
        GIL. num_local_ranks: that share the cores of this host."""
        self._config, self._platform, self._tp, self._num_local_ranks = config, platform, tp, num_local_ranks
        self._dtype = platform.resolve_dtype(config.model.dtype, config.model.spec.dtype)
        self._is_first = next(_NUMBERS) == 0
        self._free_bytes = platform.free_memory_bytes()
        self._may_build, self._built = threading.Event(), Future[BuiltModel]()
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="kernel warm-up", daemon=True)
        self._thread.start()
        if not self._may_build.wait(_TIMEOUT_S):
            _log.warning("kernels are not found after %.0f s; the model is built meanwhile", _TIMEOUT_S)

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
                pool.submit(hash_compiler)
                libraries = pool.submit(lambda: set_up_libraries(self._config, self._built.result(), self._platform))
                try:
                    self._load_or_find()
                finally:
                    self._may_build.set()  # libraries wait for the model
                libraries.result()
        except (CancelledError, ModelLoadError):
            pass  # no model is built, for a reason that its caller is told
        except Exception:  # only costs time: a missing kernel is compiled on its first launch
            _log.warning("kernel warm-up failed; kernels are compiled on their first launch", exc_info=True)
        finally:
            drop_compilers()
            self._seconds = time.monotonic() - started

    def _load_or_find(self) -> None:
        listed = KernelList.of(self._config, self._tp, self._dtype, self._platform.device)
        if not listed.exists():
            self._find(listed, beside=0)
            return
        self._may_build.set()
        if not self._load(listed):
            self._find(listed, beside=self._built.result().weights_bytes)

    def _load(self, listed: KernelList) -> bool:
        """Whether the kernels were listed, and are loaded."""
        started = time.monotonic()
        variants = listed.read()
        if variants is None:
            return False
        try:
            with KernelCompiler(self._platform.device, num_compilers(self._num_local_ranks)) as compiler:
                compiler.add(*variants)
        except Exception:
            _log.warning("the listed kernels cannot be loaded; those that are missing are found", exc_info=True)
            self._is_first = False  # those that were loaded will not be found
            self._write(listed, [])
            return False
        _log.info("%d kernels listed, loaded in %.2f s", len(variants), time.monotonic() - started)
        return True

    def _find(self, listed: KernelList, beside: int) -> None:
        """Each kernel is compiled from when it is found. beside: bytes of weights that are on the device by then."""
        with taken_compilers(self._platform.device.type, self._num_local_ranks) as compilers:
            few = FewLayers.of(self._config, self._tp, self._dtype)
            if has_room(few, beside, self._free_bytes):
                self._compile(listed, few, compilers)
            else:
                _log.info("no room for kernel warm-up beside the weights; kernels are compiled on their first launch")

    def _compile(self, listed: KernelList, few: FewLayers, compilers: CompileProcesses | None) -> None:
        started, share = time.monotonic(), (self._tp.rank, self._tp.size)
        num_threads = num_compilers(self._num_local_ranks) if compilers is None else len(compilers)
        with KernelCompiler(self._platform.device, num_threads, share, compilers) as compiler:
            variants = intercept_steps(few, self._platform, self._tp, compiler.add)
            found = time.monotonic()
            gc.collect()  # reference cycles of the dummy runner hold device memory
            self._may_build.set()
        seconds = found - started, time.monotonic() - found
        _log.info("%d kernels found in %.2f s, all compiled %.2f s later", len(variants), *seconds)
        if self._is_first:
            self._write(listed, variants)

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
def intercept_steps(
    few: FewLayers, platform: Platform, tp: TensorParallel, found: Callable[[Variant], object] = lambda _: None
) -> list[Variant]:
    """The kernel variants that `warm_up_steps` would launch, each once; `found` is called with each. Its model is bound
    here."""
    if platform.device.type == "cuda":
        torch.cuda.set_device(platform.device)
    config, model, loaded = few.config, few.model, few.loaded
    with intercept_launches(found) as intercepted:
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
