"""One rank: the methods by which an executor brings it up, runs it and asks after it."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from ringcore.config import EngineConfig
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.errors import InvalidRequestError, SleepingError
from ringcore.grammars import model_grammars
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.model_executor import ops
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.steps import ModelRunnerOutput, PendingOutput, SchedulerOutput
from ringcore.worker.memory.host_store import HostStore
from ringcore.worker.platforms import choose_platform
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.rpc import rpc
from ringcore.worker.runner.model_runner import LoadedModel, ModelRunner
from ringcore.worker.sleep import RESIDENT, RankMemory, begin_host_store
from ringcore.worker.start_up.memory_budget import StepPeaks, format_table, memory_table
from ringcore.worker.thread_stacks import thread_stacks
from ringcore.worker.weights.weight_group import BroadcastGroup
from ringcore.worker.weights.weight_sources import WeightReceiver

if TYPE_CHECKING:
    from ringcore.worker.start_up.kernel_warm_up import KernelWarmUp

__all__ = ["Worker"]

_log = logging.getLogger(__name__)
_Stage = TypeVar("_Stage")


class Worker:
    """Rank `rank` of `config.parallel.tensor_parallel_size`.

    It comes up in stages, each made by the method of its name and needed by the next:
    init_device -> load_model -> get_kv_cache_spec, determine_available_memory -> initialize_from_config -> steps.
    """

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str | None) -> None:
        """`rendezvous`: the file by which the ranks find each other; None for one rank."""
        self.config = config
        self.rank = rank
        self._rendezvous = rendezvous
        self._platform: Platform | None = None
        self._tp: TensorParallel | None = None
        self._loaded: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._host_store: HostStore | None = None  # where memory can be given back, as the next
        self._rank_memory: RankMemory | None = None
        self._new_weights = WeightReceiver()
        self._grammars = model_grammars(config)  # the runner's too
        self._peaks: StepPeaks | None = None  # until they are measured, where they are
        self._kv_cache_bytes = 0
        self._counts = 0, 0  # steps, tokens: one object, so that no other thread sees the one without the other

    @rpc(scope="engine")
    def init_device(self) -> dict[str, float]:
        """Takes hold of the device and meets the other ranks; -> the seconds of each. Raises `ConfigError`, and
        RuntimeError if a rank is absent."""
        started = time.monotonic()
        device = self.config.device
        self._platform = choose_platform(device.device, self.rank, device.device_memory, device.enable_sleep_mode)
        self.config = self.config.on_device(self._platform.device.type)
        self._platform.synchronize()  # by now the device has its context
        has_device = time.monotonic()
        self._tp = self._connect(self._platform)
        return {"device_s": has_device - started, "connect_s": time.monotonic() - has_device}

    def _connect(self, platform: Platform) -> TensorParallel:
        size = self.config.parallel.tensor_parallel_size
        if size == 1:
            return SingleRank()
        if self._rendezvous is None:
            raise InvalidRequestError(
                f"rendezvous=None: {size} ranks need a file to find each other", field="rendezvous", value=None
            )
        return platform.connect(self.rank, size, self._rendezvous)

    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        """-> "weights_bytes", and the seconds of what goes on at the same time: "weights_s", "kernels_s" where there
        are kernels to compile. Raises `ModelLoadError`."""
        platform, tp = _made(self._platform, "init_device"), _made(self._tp, "init_device")
        kernels = _compile_kernels(self.config, platform, tp)
        try:
            begin_store = self._begin_store if self.config.device.enable_sleep_mode else None
            self._loaded = LoadedModel.load(self.config, platform, tp, begin_store)
        finally:
            kernels_s = None if kernels is None else kernels.finish()
        told = {"weights_bytes": float(self._loaded.weights_bytes), "weights_s": self._loaded.load_s}
        return told if kernels_s is None else told | {"kernels_s": kernels_s}

    def _begin_store(self) -> None:
        """Before anything else that takes long, so that the first sleep finds it made."""
        size, directory = self.config.parallel.tensor_parallel_size, self.config.device.sleep_directory
        self._host_store = begin_host_store(_made(self._platform, "init_device"), directory, size)

    @rpc(scope="engine")
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each attention layer stores, by the layer's name."""
        return _made(self._loaded, "load_model").kv_cache_spec(self.config.cache.block_size)

    @rpc(scope="engine")
    def determine_available_memory(self) -> dict[str, int]:
        """The memory table in bytes; `available_kv_cache_bytes` is what the KV cache may have. See `worker.memory`.

        Where the device measures steps it runs some, together with the other ranks. Raises `CapacityError`.
        """
        loaded = _made(self._loaded, "load_model")
        platform = _made(self._platform, "init_device")
        specs = self.get_kv_cache_spec()
        if platform.measures_steps:
            from ringcore.worker.start_up.profile_run import profile_steps  # with the kernels, which a CPU may not have

            self._peaks = profile_steps(self.config, loaded.model, specs, platform)
        table = memory_table(self.config, platform, specs, loaded.dtype, loaded.weights_bytes, self._peaks)
        _log.info("%s", format_table(self.rank, table))
        return table

    @rpc(scope="engine")
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> dict[str, float]:
        """Allocates the pages as planned and warms up; -> the seconds of each, and "graphs_left", how often
        `capture_graph` has something to do. Raises `CapacityError` or `ConfigError`."""
        started = time.monotonic()
        loaded = _made(self._loaded, "load_model")
        platform = _made(self._platform, "init_device")
        self._runner = _runner_class(platform)(self.config, loaded, kv_cache_config, platform, self.rank)
        self._runner.adjustments.grammars = self._grammars
        has_pages = time.monotonic()
        self._runner.warm_up()
        self._kv_cache_bytes = kv_cache_config.total_bytes
        if self._host_store is not None:
            self._rank_memory = RankMemory(platform, self._host_store)
        warm_up_s, graphs_left = time.monotonic() - has_pages, float(self._runner.num_graphs_left)
        return {"pages_s": has_pages - started, "warm_up_s": warm_up_s, "graphs_left": graphs_left}

    @rpc(scope="engine")
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | PendingOutput | None:
        """One step, or the several of one message; what they sampled on rank 0, None on the others. On a GPU they are
        launched, and what they sampled comes later."""
        output = self._awake_runner().execute(scheduler_output)
        num_steps, num_tokens = self._counts
        self._counts = num_steps + scheduler_output.num_steps, num_tokens + scheduler_output.num_tokens
        return output

    def _awake_runner(self) -> ModelRunner:
        runner = _made(self._runner, "initialize_from_config")
        if self._rank_memory is not None and not self._rank_memory.is_resident:
            away = [tag for tag, state in self._rank_memory.states.items() if state != RESIDENT]
            raise SleepingError("the memory of weights or KV cache was given back; call wake_up() first", tags=away)
        return runner

    @rpc(scope="engine")
    def capture_graph(self) -> int:
        """Captures one of the CUDA graphs that are not there, which else the first step of its size has to do; -> how
        many are left. The engine calls it while it has nothing to do. All ranks must be called together."""
        runner = self._awake_runner()
        runner.capture_graph()
        return runner.num_graphs_left

    @rpc(scope="engine")
    def reset_rows(self) -> None:
        """Forgets every row, as if all had finished."""
        _made(self._runner, "initialize_from_config").rows.clear()

    # The engine calls these: it knows whether the contents are what they should be, and tells all ranks the same.

    @rpc(scope="engine")
    def prepare_memory(self, target: dict[str, str]) -> dict[str, float]:
        """Takes what it needs to bring "weights" and "kv_cache" into these states: "resident", "offloaded" (weights
        only) or "discarded"; -> what that came to, see `RankMemory`. Loses nothing: `commit_memory` or
        `roll_back_memory` follows. Raises `CapacityError`, and has changed nothing then."""
        if self._rank_memory is None:
            _made(self._runner, "initialize_from_config")
            raise InvalidRequestError(
                "enable_sleep_mode=False: this engine keeps its memory; start it with enable_sleep_mode=True",
                field="enable_sleep_mode",
                value=False,
            )
        return self._rank_memory.prepare(target)

    @rpc(scope="engine")
    def commit_memory(self) -> dict[str, float]:
        """Goes through with what is prepared; -> the bytes that were freed, and what is left, see `RankMemory`."""
        assert self._rank_memory is not None, "no change is prepared"
        return self._rank_memory.commit()

    @rpc(scope="engine")
    def roll_back_memory(self) -> None:
        """Undoes `prepare_memory`. Where nothing is prepared, nothing happens."""
        if self._rank_memory is not None:
            self._rank_memory.roll_back()

    @rpc(read_only=True)
    def memory_states(self) -> dict[str, str]:
        """By tag: "resident", "offloaded" or "discarded"."""
        memory = self._rank_memory
        return dict.fromkeys(("weights", "kv_cache"), RESIDENT) if memory is None else memory.states

    @rpc(scope="engine")
    def start_weight_update(self) -> None:
        """Begins to replace the weights, in place; an update that was begun is given up. Raises `InvalidRequestError`
        where they are packed for the CPU's kernels."""
        self._new_weights.start(_made(self._loaded, "load_model"))

    @rpc(scope="engine")
    def update_weights(self, source: dict[str, Any]) -> dict[str, float]:
        """One chunk of an update, of any number: tensors by their names in a checkpoint, and whole; this rank takes its
        slices. source: a `FilesSource`, `IpcSource` or `GroupSource` of `weight_sources`, as a dict.

        -> "num_tensors", "num_bytes" that were written on this rank, "seconds". Raises `InvalidRequestError` for what
        does not fit the model: of that tensor nothing is written.
        """
        return self._new_weights.receive(source, _made(self._platform, "init_device"))

    @rpc(scope="engine")
    def finish_weight_update(self, require_all: bool) -> dict[str, float]:
        """Ends an update: what is derived from the weights is made anew. -> "num_tensors" of the whole update, and
        "seconds". require_all: raises `InvalidRequestError` that names what has not come."""
        loaded, platform = _made(self._loaded, "load_model"), _made(self._platform, "init_device")
        return self._new_weights.finish(require_all, loaded, platform)

    @rpc(scope="lifecycle")
    def join_weight_group(
        self, address: str, port: int, world_size: int, rank: int, backend: str, timeout_s: float
    ) -> None:
        """Joins the group of a trainer, its rank 0 (`ringcore.weights.WeightGroup`), and leaves the one before.

        rank: of this engine's first worker; the others follow in their order, so all are given the same. backend:
        "nccl", or "gloo" by way of the host. timeout_s: of joining, and later of each piece of a tensor. Raises
        `InvalidRequestError`.
        """
        device = _made(self._platform, "init_device").device
        mine = rank + self.rank
        self._new_weights.join(BroadcastGroup(address, port, world_size, mine, backend, timeout_s, device))

    @rpc(scope="lifecycle")
    def leave_weight_group(self) -> None:
        """Leaves the group that was joined. Idempotent."""
        self._new_weights.leave()

    # Read-only methods run on another thread, also while one of the above runs. Each reads an attribute once and goes
    # on with what it got; what they read of the model and the device is fixed once it is there.

    @rpc(read_only=True)
    def stats(self) -> dict[str, int]:
        """Counts since the start, the CUDA graphs that are not there yet, and the process's resident bytes."""
        num_steps, num_tokens = self._counts
        runner = self._runner
        return {
            "rank": self.rank,
            "num_steps": num_steps,
            "num_tokens": num_tokens,
            "num_graphs_left": 0 if runner is None else runner.num_graphs_left,
            "resident_bytes": _resident_bytes(),
        }

    @rpc(read_only=True)
    def memory(self) -> dict[str, int]:
        """The table of `worker.memory` as it would be now, in bytes, and what the process has: `resident_bytes`, and
        `kv_cache_bytes`, the pages. Before the model is loaded, only those two."""
        loaded, platform, kv_cache_bytes = self._loaded, self._platform, self._kv_cache_bytes
        table = {"resident_bytes": _resident_bytes(), "kv_cache_bytes": kv_cache_bytes}
        if loaded is None or platform is None:
            return table
        specs = loaded.kv_cache_spec(self.config.cache.block_size)
        return memory_table(self.config, platform, specs, loaded.dtype, loaded.weights_bytes, self._peaks) | table

    @rpc(read_only=True, scope="engine")
    def compile_grammar(self, spec: StructuredOutputsParams) -> None:
        """Makes the grammar of coming requests ready, while steps go on. Raises `InvalidRequestError`."""
        self._grammars.compile(spec)

    @rpc(read_only=True)
    def stack(self) -> str:
        """The Python stack of every thread."""
        return thread_stacks()

    @rpc(read_only=True)
    def health(self) -> dict[str, Any]:
        """Who answers, how far it has come ("new", "device", "model" or "ready"), and on what device: "cuda" or "cpu",
        None while it is new."""
        platform = self._platform
        stages = {"ready": self._runner, "model": self._loaded, "device": platform}
        stage = next((name for name, made in stages.items() if made is not None), "new")
        device = None if platform is None else platform.device.type
        return {"rank": self.rank, "pid": os.getpid(), "stage": stage, "device": device}

    @rpc(scope="engine")
    def shutdown(self) -> None:
        """Gives back the pages, the weights and the connections. Idempotent."""
        self._rank_memory = None
        store, self._host_store = self._host_store, None
        if store is not None:
            store.close()
        self._new_weights.close()
        self._runner, self._kv_cache_bytes = None, 0
        self._loaded = None
        tp, self._tp = self._tp, None
        if tp is not None:
            tp.close()
        platform, self._platform = self._platform, None
        if platform is not None:
            platform.close()


def _compile_kernels(config: EngineConfig, platform: Platform, tp: TensorParallel) -> KernelWarmUp | None:
    """In a thread; None where there are none."""
    if not ops.has_kernels(platform.device):
        return None
    from ringcore.worker.start_up.kernel_warm_up import KernelWarmUp  # with the kernels, which a CPU may not have

    dtype = platform.resolve_dtype(config.model.dtype, config.model.spec.dtype)
    return KernelWarmUp(config, platform, tp, dtype, _runner_class(platform))


def _runner_class(platform: Platform) -> type[ModelRunner]:
    if not ops.has_kernels(platform.device):
        return ModelRunner
    from ringcore.worker.runner.gpu_model_runner import GPUModelRunner  # with the kernels, which a CPU may not have

    return GPUModelRunner


def _resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def _made(stage: _Stage | None, method: str) -> _Stage:
    if stage is None:
        raise InvalidRequestError(f"the worker is not that far; call {method} first", field="method", value=method)
    return stage
