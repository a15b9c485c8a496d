"""The worker of one rank: the RPC methods by which an executor starts, runs and monitors it."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ringcore.config import EngineConfig
from ringcore.distributed.parallel import TensorParallel
from ringcore.distributed.pipeline import StageLink
from ringcore.errors import InvalidRequestError, SleepingError
from ringcore.grammars import model_grammars
from ringcore.host.resources import process_usage, resident_bytes
from ringcore.host.thread_stacks import thread_stacks
from ringcore.kv_cache.spec import KVCacheConfig, KVCacheSpec
from ringcore.model_executor import ops
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.expert_placement import ExpertLoad
from ringcore.protocol.kernel_tuning import KernelTuning
from ringcore.protocol.model_report import ModelReport
from ringcore.protocol.steps import PendingOutput, SchedulerOutput
from ringcore.protocol.stored_kv import LoadReport
from ringcore.tracing import Tracer
from ringcore.worker.kv_store.connector import KVConnector
from ringcore.worker.kv_store.opening import open_connector
from ringcore.worker.memory.host_store import HostStore
from ringcore.worker.platforms import choose_platform
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.rpc import rpc
from ringcore.worker.runner.host_launcher import HostLauncher
from ringcore.worker.runner.loaded_model import BuiltModel, LoadedModel
from ringcore.worker.runner.model_runner import ModelRunner
from ringcore.worker.runner.step_launcher import StepLauncher
from ringcore.worker.sleep import RESIDENT, RankMemory, begin_host_store
from ringcore.worker.start_up.connections import connect, stage_of
from ringcore.worker.start_up.memory_budget import StepPeaks, format_table, memory_table
from ringcore.worker.traced_worker import Recorder, TracedWorker
from ringcore.worker.weights.weight_group import BroadcastGroup
from ringcore.worker.weights.weight_sources import WeightReceiver

if TYPE_CHECKING:
    from ringcore.worker.start_up.kernel_warm_up import KernelWarmUp

__all__ = ["Worker"]

_log = logging.getLogger(__name__)
_Stage = TypeVar("_Stage")


class Worker(TracedWorker):
    """Rank `rank` of `config.parallel.layout`.

    It starts in stages, one method each; every stage requires the previous one:
    init_device -> load_model -> get_kv_cache_spec, tune_kernels where asked, determine_available_memory ->
    initialize_from_config -> steps.
    """

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str | None) -> None:
        """rendezvous: the file or address where the ranks meet; None for one rank."""
        self.config = config
        self.rank = rank
        self.tracer = Tracer()
        self._layout = config.parallel.layout
        self._stage = stage_of(self._layout, rank)
        self._rendezvous = rendezvous
        self._platform: Platform | None = None
        self._tp: TensorParallel | None = None
        self._link: StageLink | None = None
        self._loaded: LoadedModel | None = None
        self._runner: ModelRunner | None = None
        self._host_store: HostStore | None = None  # in sleep mode, as the next
        self._rank_memory: RankMemory | None = None
        self._kv_store: KVConnector | None = None
        self._new_weights = WeightReceiver()
        self._grammars = model_grammars(config)  # shared with the runner
        self._peaks: StepPeaks | None = None  # None until measured; stays None on a CPU
        self._kv_cache_bytes = 0
        self._counts = 0, 0  # (steps, tokens): one object, so that other threads read both consistently

    @rpc(scope="engine")
    def init_device(self) -> dict[str, float]:
        """Initializes the device and the process group; -> the seconds of each. Raises `ConfigError`, and RuntimeError
        if a rank is missing."""
        started = time.monotonic()
        device = self.config.device
        local = self._layout.local_rank(self.rank)
        self._platform = choose_platform(device.device, local, device.device_memory, device.enable_sleep_mode)
        self.config = self.config.on_device(self._platform.device.type)
        self._platform.synchronize()  # returns once the device's context exists
        has_device = time.monotonic()
        self._tp, self._link = connect(self._platform, self._layout, self.rank, self._rendezvous)
        if self.config.parallel.expert_parallel:
            self._tp.begin_combine()
        return {"device_s": has_device - started, "connect_s": time.monotonic() - has_device}

    @rpc(scope="engine")
    def load_model(self) -> dict[str, float]:
        """-> "weights_bytes", and seconds: "build_s", then two concurrent jobs: "weights_s", and "kernels_s" (kernel
        warm-up, which begins before the build) where the device has kernels. Raises `ModelLoadError`."""
        platform, tp = _require(self._platform, "init_device"), _require(self._tp, "init_device")
        kernels = _compile_kernels(self.config, platform, tp, self.rank)
        try:
            built = BuiltModel.of(self.config, platform, tp, self._stage)
            if kernels is not None:
                kernels.follow(built)
            begin_store = self._begin_store if self.config.device.enable_sleep_mode else None
            self._loaded = built.load(self.config, platform, begin_store)
        finally:
            kernels_s = None if kernels is None else kernels.finish()
        loaded = self._loaded
        report = {"weights_bytes": loaded.weights_bytes, "build_s": built.build_s, "weights_s": loaded.load_s}
        return report if kernels_s is None else report | {"kernels_s": kernels_s}

    def _begin_store(self) -> None:
        """Called before the weights are read, so that the host store is ready for the first sleep."""
        num_ranks, directory = self._layout.num_local_ranks(self.rank), self.config.device.sleep_directory
        self._host_store = begin_host_store(_require(self._platform, "init_device"), directory, num_ranks)

    @rpc(scope="engine")
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """The KV cache spec of each attention layer, by the layer's name."""
        return _require(self._loaded, "load_model").kv_cache_spec(self.config.cache)

    @rpc(scope="engine")
    def tune_kernels(self) -> KernelTuning | None:
        """Searches the fastest tiles of the model's products, see `tile_search`; on all ranks together. None where the
        device has no kernels."""
        loaded, platform = _require(self._loaded, "load_model"), _require(self._platform, "init_device")
        if loaded.tiles is None:
            return None
        from ringcore.worker.start_up.tuned_kernels import tune_kernels  # with the kernels, which a CPU may not have

        return tune_kernels(self.config, loaded, platform, _require(self._tp, "init_device"))

    @rpc(scope="engine")
    def determine_available_memory(self) -> dict[str, int]:
        """The memory table in bytes; `available_kv_cache_bytes` is the KV cache's share. See `memory_budget`.

        A platform that measures steps does its profile run here, on all ranks together. Raises `CapacityError`.
        """
        loaded = _require(self._loaded, "load_model")
        platform = _require(self._platform, "init_device")
        specs = self.get_kv_cache_spec()
        if platform.measures_steps:
            from ringcore.worker.start_up.profile_run import profile_steps  # with the kernels, which a CPU may not have

            self._peaks = profile_steps(self.config, loaded.model, specs, platform)
        table = self._memory_table(loaded, platform)
        _log.info("%s", format_table(self.rank, table))
        return table

    @rpc(scope="engine")
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> dict[str, float | ModelReport]:
        """Allocates this rank's part of the planned KV cache and warms up; -> the seconds of each, "graphs_left", the
        number of CUDA graphs that `capture_graph` can still capture, and "model". Raises `CapacityError` or
        `ConfigError`."""
        started = time.monotonic()
        loaded = _require(self._loaded, "load_model")
        platform = _require(self._platform, "init_device")
        launcher, is_output_rank = _launcher_class(platform), self.rank == self._layout.output_rank
        own = kv_cache_config.of_layers(self.get_kv_cache_spec().keys())
        self._runner = ModelRunner(
            self.config, loaded, own, platform, is_output_rank, launcher, self.tracer, self._link
        )
        self._runner.adjustments.grammars = self._grammars
        has_pages = time.monotonic()
        self._runner.warm_up()
        self._runner.learn_costs(_require(self._tp, "init_device"))
        self._kv_cache_bytes = own.total_bytes
        if self._host_store is not None:
            self._rank_memory = RankMemory(platform, self._host_store)
        loaded.expert_loads()  # those of dummy steps are dropped
        warm_up_s, graphs_left = time.monotonic() - has_pages, float(self._runner.num_graphs_left)
        seconds = {"pages_s": has_pages - started, "warm_up_s": warm_up_s}
        return {**seconds, "graphs_left": graphs_left, "model": loaded.model.report()}

    @rpc(scope="engine")
    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Launches the one or several steps of a message; -> their output on the output rank, None on the others.
        On a GPU they are in flight when this returns."""
        runner = self._awake_runner()
        if self._kv_store is not None and scheduler_output.kv_transfers is not None:
            self._kv_store.transfer(scheduler_output.kv_transfers)
        output = runner.execute(scheduler_output)
        num_steps, num_tokens = self._counts
        self._counts = num_steps + scheduler_output.num_steps, num_tokens + scheduler_output.num_tokens
        return output

    def _awake_runner(self) -> ModelRunner:
        runner = _require(self._runner, "initialize_from_config")
        if self._rank_memory is not None and not self._rank_memory.is_resident:
            away = [tag for tag, state in self._rank_memory.states.items() if state != RESIDENT]
            raise SleepingError("the memory of weights or KV cache was given back; call wake_up() first", tags=away)
        return runner

    @rpc(scope="engine")
    def capture_graph(self) -> int:
        """Captures one missing CUDA graph, which the first step of its size would capture otherwise; -> how many are
        left. The engine calls it on all ranks together while it is idle."""
        runner = self._awake_runner()
        runner.capture_graph()
        return runner.num_graphs_left

    @rpc(scope="engine")
    def reset_rows(self) -> None:
        """Clears every row, as if all requests had finished."""
        _require(self._runner, "initialize_from_config").rows.clear()

    @rpc(scope="engine")
    def open_kv_store(self, namespace: str, num_blocks: int) -> list[bytes]:
        """Opens the store of blocks that leave the device, num_blocks in host memory, as the options ask; -> the names
        of what it holds, the least recently used first. Raises `CapacityError` or `ConfigError`."""
        runner, platform = self._awake_runner(), _require(self._platform, "init_device")
        self._kv_store = open_connector(self.config, self.rank, runner.paged, platform, namespace, num_blocks)
        return self._kv_store.held()

    @rpc(scope="engine")
    def finished_kv_loads(self, numbers: list[int], wait_s: float) -> LoadReport:
        """What came of these loads in flight. Waits up to wait_s seconds for one to end."""
        assert self._kv_store is not None, "there is no store"
        return LoadReport(self._kv_store.results(numbers, wait_s), self._kv_store.counts())

    @rpc(scope="engine")
    def expert_loads(self) -> list[ExpertLoad]:
        """The tokens of experts since the call before, and where they are: see `LoadedModel.expert_loads`. Empty but on
        the first rank of a stage, as all have the same."""
        loads = _require(self._loaded, "load_model").expert_loads()
        return loads if self._layout.tensor_rank_of(self.rank) == 0 else []

    @rpc(scope="engine")
    def place_experts(self, stage: int, layer: int, experts: list[int]) -> int:
        """Places the experts of a layer of a stage anew, on all its ranks together; -> the bytes written here."""
        self._awake_runner()
        loaded, platform = _require(self._loaded, "load_model"), _require(self._platform, "init_device")
        num_bytes = loaded.place_experts(layer, experts) if stage == self._stage.index else 0
        platform.synchronize()
        return num_bytes

    # Sleep and wake: the engine tracks whether the contents are valid, and calls all ranks alike.

    @rpc(scope="engine")
    def prepare_memory(self, target: dict[str, str]) -> dict[str, float]:
        """First phase of bringing "weights" and "kv_cache" into these states: "resident", "offloaded" (weights only) or
        "discarded"; -> bytes and seconds, see `RankMemory`. Loses no contents: `commit_memory` or `roll_back_memory`
        must follow. Raises `CapacityError`, and has changed nothing then."""
        if self._rank_memory is None:
            _require(self._runner, "initialize_from_config")
            raise InvalidRequestError(
                "enable_sleep_mode=False: this engine keeps its memory; start it with enable_sleep_mode=True",
                field="enable_sleep_mode",
                value=False,
            )
        return self._rank_memory.prepare(target)

    @rpc(scope="engine")
    def commit_memory(self) -> dict[str, float]:
        """Commits the prepared change; -> the bytes freed, and those still in use, see `RankMemory`."""
        assert self._rank_memory is not None, "no change is prepared"
        return self._rank_memory.commit()

    @rpc(scope="engine")
    def roll_back_memory(self) -> None:
        """Undoes `prepare_memory`. A no-op where nothing is prepared."""
        if self._rank_memory is not None:
            self._rank_memory.roll_back()

    @rpc(read_only=True)
    def memory_states(self) -> dict[str, str]:
        """The state of each tag: "resident", "offloaded" or "discarded"."""
        memory = self._rank_memory
        return dict.fromkeys(("weights", "kv_cache"), RESIDENT) if memory is None else memory.states

    @rpc(scope="engine")
    def start_weight_update(self) -> None:
        """Starts a weight update in place; an unfinished update is abandoned. Raises `InvalidRequestError` where the
        weights are packed for the CPU's kernels."""
        self._new_weights.start(_require(self._loaded, "load_model"))

    @rpc(scope="engine")
    def update_weights(self, source: dict[str, Any]) -> dict[str, float]:
        """Applies one of any number of chunks of an update: whole tensors by their checkpoint names, of which this rank
        copies its slices. source: a `FilesSource`, `IpcSource` or `GroupSource` of `weight_sources`, as a dict.

        -> "num_tensors", "num_bytes" written on this rank, "seconds". Raises `InvalidRequestError` for a tensor that
        does not fit the model, before any of it is written.
        """
        return self._new_weights.receive(source, _require(self._platform, "init_device"))

    @rpc(scope="engine")
    def finish_weight_update(self, require_all: bool) -> dict[str, float]:
        """Ends an update and recomputes what is derived from the weights. -> "num_tensors" of the whole update, and
        "seconds". require_all: raises `InvalidRequestError` that names a missing tensor."""
        loaded, platform = _require(self._loaded, "load_model"), _require(self._platform, "init_device")
        return self._new_weights.finish(require_all, loaded, platform)

    @rpc(scope="lifecycle")
    def join_weight_group(
        self, address: str, port: int, world_size: int, rank: int, backend: str, timeout_s: float
    ) -> None:
        """Joins the broadcast group of a trainer, which is its rank 0 (`ringcore.weights.WeightGroup`), and leaves the
        previous one.

        rank: of this engine's first worker; the others get the following ranks in order, so all are called with the
        same value. backend: "nccl", or "gloo" via the host. timeout_s: of joining, and later of each chunk of a tensor.
        Raises `InvalidRequestError`.
        """
        device = _require(self._platform, "init_device").device
        group_rank = rank + self.rank
        self._new_weights.join(BroadcastGroup(address, port, world_size, group_rank, backend, timeout_s, device))

    @rpc(scope="lifecycle")
    def leave_weight_group(self) -> None:
        """Leaves the joined group. Idempotent."""
        self._new_weights.leave()

    # Read-only methods run on the side thread, concurrently with the methods above. Each reads an attribute once into a
    # local; the parts of model and device that they read are immutable after creation.

    @rpc(read_only=True)
    def stats(self) -> dict[str, float]:
        """Counters since the start, the CUDA graphs not captured yet, and what process and device are used."""
        num_steps, num_tokens = self._counts
        runner, platform = self._runner, self._platform
        counts: dict[str, float] = {
            "rank": self.rank,
            "num_steps": num_steps,
            "num_tokens": num_tokens,
            "num_graphs_left": 0 if runner is None else runner.num_graphs_left,
        }
        return counts | process_usage() | ({} if platform is None else platform.usage())

    @rpc(read_only=True)
    def memory(self) -> dict[str, int]:
        """The memory table recomputed now, in bytes, with the process's `resident_bytes` and the allocated
        `kv_cache_bytes`. Before the model is loaded, only those two."""
        loaded, platform, kv_cache_bytes = self._loaded, self._platform, self._kv_cache_bytes
        table = {"resident_bytes": resident_bytes(), "kv_cache_bytes": kv_cache_bytes}
        if loaded is None or platform is None:
            return table
        return self._memory_table(loaded, platform) | table

    def _memory_table(self, loaded: LoadedModel, platform: Platform) -> dict[str, int]:
        specs = loaded.kv_cache_spec(self.config.cache)
        return memory_table(self.config, platform, specs, loaded.dtype, loaded.weights_bytes, self._peaks, self.rank)

    @rpc(read_only=True, scope="engine")
    def compile_grammar(self, spec: StructuredOutputsParams) -> None:
        """Compiles the grammar of coming requests, concurrently with steps. Raises `InvalidRequestError`."""
        self._grammars.compile(spec)

    @rpc(read_only=True)
    def stack(self) -> str:
        """The Python stack of every thread."""
        return thread_stacks()

    @rpc(read_only=True)
    def health(self) -> dict[str, Any]:
        """Rank, pid, start-up stage ("new", "device", "model" or "ready"), and device type ("cuda" or "cpu"; None while
        new)."""
        platform = self._platform
        stages = {"ready": self._runner, "model": self._loaded, "device": platform}
        stage = next((name for name, part in stages.items() if part is not None), "new")
        device = None if platform is None else platform.device.type
        return {"rank": self.rank, "pid": os.getpid(), "stage": stage, "device": device}

    def begin_recorder(self, operators: bool) -> Recorder | None:
        from ringcore.worker.device_profile import DeviceProfile  # with the profiler, which few workers need

        device = _require(self._platform, "init_device").device
        return DeviceProfile(device, operators) if DeviceProfile.records(device, operators) else None

    @rpc(scope="engine")
    def shutdown(self) -> None:
        """Frees the KV cache, the weights and the connections. Idempotent."""
        self._rank_memory = None
        kv_store, self._kv_store = self._kv_store, None
        if kv_store is not None:
            kv_store.close()
        store, self._host_store = self._host_store, None
        if store is not None:
            store.close()
        self._new_weights.close()
        self._runner, self._kv_cache_bytes = None, 0
        self._loaded = None
        connections, self._tp, self._link = (self._tp, self._link), None, None
        for connection in connections:
            if connection is not None:
                connection.close()
        platform, self._platform = self._platform, None
        if platform is not None:
            platform.close()


def _compile_kernels(config: EngineConfig, platform: Platform, tp: TensorParallel, rank: int) -> KernelWarmUp | None:
    """Starts kernel warm-up in a thread; None where the device has no kernels."""
    if not ops.has_kernels(platform.device):
        return None
    from ringcore.worker.start_up.kernel_warm_up import KernelWarmUp  # with the kernels, which a CPU may not have

    return KernelWarmUp(config, platform, tp, config.parallel.layout.num_local_ranks(rank))


def _launcher_class(platform: Platform) -> type[StepLauncher]:
    if not ops.has_kernels(platform.device):
        return HostLauncher
    from ringcore.worker.runner.device_launcher import DeviceLauncher  # with the kernels, which a CPU may not have

    return DeviceLauncher


def _require(stage: _Stage | None, method: str) -> _Stage:
    if stage is None:
        raise InvalidRequestError(f"the worker is not ready; call {method} first", field="method", value=method)
    return stage
