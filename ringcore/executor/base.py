"""The interface between the engine and its workers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping

from ringcore.config import EngineConfig
from ringcore.executor.rpc_call import EncodedCall, RpcFuture, RpcSubmitter, WorkerCall
from ringcore.protocol.messages import RankHealth
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.steps import SchedulerOutput
from ringcore.tracing import Tracer

__all__ = ["Executor"]


class Executor(RpcSubmitter):
    """Starts the workers of one engine and calls their methods.

    Every call is one broadcast and a gather of replies in rank order. Each worker executes calls in the order of
    submission, except read-only methods, which use a control channel. `config.parallel.layout` says how many workers
    there are, and which one returns a step's output.

    methods: the methods that every worker declares with `@rpc`, by name; set by `start` and `restart`. Clients cannot
    call other ones.
    on_wait: called repeatedly while a call waits for room in the full queue to the workers (back-pressure).
    tracer: of this process; the engine sets its own.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.methods: Mapping[str, RpcMethod] = {}
        self.on_wait: Callable[[], None] = lambda: None
        self.tracer = Tracer()

    def begin(self) -> None:
        """Starts the processes of workers that can be started without a wait; may be called once, before `start`, whose
        caller has something to do meanwhile. Raises as `start`."""

    @abstractmethod
    def start(self) -> dict[str, float]:
        """Starts every worker and returns when all have their device and model. Raises the error that stopped a worker.

        Returns the seconds of its phases, in order: "start_workers", "init_device", "load_model"; after each, as
        "load_model.weights", the parts that the workers report, which may overlap.
        """

    @abstractmethod
    def restart(self) -> dict[str, float]:
        """Kills the remaining workers and starts new ones, as `start` does.

        Earlier futures fail. `wait_fds` changes. Raises the error that stopped a new worker, after which it may be
        called again; `EngineDeadError` after `shutdown`.
        """

    def submit(self, call: WorkerCall) -> RpcFuture:
        """A call that the engine makes, which may name an engine-scope method."""
        return self.forward(call.encoded(by_engine=True))

    @abstractmethod
    def forward(self, call: EncodedCall) -> RpcFuture:
        """Broadcasts a call; the future's result is a list, one value a rank, or the value of `unique_reply_rank`.
        `call.by_engine` says whether the engine itself makes the call: workers refuse engine-scope methods to any other
        call. The caller may change the buffers after it returns."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        """Broadcasts a step; the future's result is the output rank's `ModelRunnerOutput`."""

    @abstractmethod
    def wait_fds(self) -> list[int]:
        """Descriptors that become readable when a future may have completed or a worker has died."""

    @abstractmethod
    def pids(self) -> dict[str, int]:
        """The processes by name, e.g. {"worker 0": 4711}; empty if the worker is in this process."""

    @abstractmethod
    def check(self) -> None:
        """Raises `EngineDeadError` if a worker has died; else returns at once."""

    @abstractmethod
    def health(self) -> list[RankHealth]:
        """The health of each worker, without a call to it. Never waits."""

    @abstractmethod
    def oldest_step_s(self) -> float | None:
        """The age of the oldest step in flight, in seconds; None if there is none. Never waits."""

    @abstractmethod
    def diagnose(self) -> str:
        """A report for a person: each worker's current call and Python stacks. Takes up to 0.5 s a rank."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees their resources. Idempotent; pending futures raise `EngineDeadError`."""
