"""The interface between the engine and its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError
from ringcore.executor.callables import callable_name
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.value_codec import encode_request
from ringcore.executor.wire import CALL, CALLABLE, CallHead
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.messages import RankHealth
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.steps import SchedulerOutput

__all__ = ["EncodedCall", "Executor", "RpcFuture", "check_reply_rank"]


@dataclass(frozen=True, slots=True)
class EncodedCall:
    """A call of a worker method with its arguments encoded, for `Executor.forward`.

    method: the name, also that of a callable. parts: the result of `value_codec.encode_request`. is_callable: `parts`
    hold a packed function in place of a name. timeout: seconds from the submission; None waits for result or death.
    unique_reply_rank: every rank executes the call, only this one replies; None: all reply. by_engine: the engine
    itself makes the call, so it may call `@rpc(scope="engine")` methods; never set for a client's call.
    """

    method: str
    parts: Sequence[Buffer]
    is_callable: bool = False
    timeout: float | None = None
    unique_reply_rank: int | None = None
    by_engine: bool = False

    @classmethod
    def of(
        cls,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
        by_engine: bool = False,
    ) -> EncodedCall:
        """Raises `InvalidRequestError` for an invalid method or timeout, and for arguments that cannot be sent."""
        check_timeout("timeout", timeout)
        parts = encode_request(method, args, kwargs)
        name = method if isinstance(method, str) else callable_name(method)
        return cls(name, parts, not isinstance(method, str), timeout, unique_reply_rank, by_engine)

    def head(self, call_id: int = 0) -> CallHead:
        """The call's envelope."""
        kind = CALLABLE if self.is_callable else CALL
        return CallHead(call_id, kind, self.unique_reply_rank, self.method, self.by_engine)


class RpcFuture(Protocol):
    """A call in flight."""

    def done(self) -> bool:
        """Whether `result` would return (or raise) at once. Applies the replies that have arrived; never blocks."""
        ...

    def result(self, timeout: float | None = None) -> Any:
        """The call's value. Ends on the result, the death of a worker, or the deadline, whichever is first.

        Raises the error of the lowest failed rank, with the errors of all ranks in `failures`; `EngineDeadError`; or
        `RpcTimeoutError`. A value that cannot be decoded is a `WorkerError`.
        """
        ...

    def encoded_result(self) -> list[list[Buffer]]:
        """The encoded buffers of each value, in rank order. Waits and raises as `result`."""
        ...


class Executor(ABC):
    """Starts the workers of one engine and calls their methods.

    Every call is one broadcast and a gather of replies in rank order. Each worker executes calls in the order of
    submission, except read-only methods, which use a control channel.
    `timeout` is in seconds from the submission; None waits for result or death.

    methods: the methods that every worker declares with `@rpc`, by name; set by `start` and `restart`. Clients cannot
    call other ones.
    on_wait: called repeatedly while a call waits for room in the full queue to the workers (back-pressure).
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.methods: Mapping[str, RpcMethod] = {}
        self.on_wait: Callable[[], None] = lambda: None

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

    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> RpcFuture:
        """Broadcasts a call that the engine makes; the future's result is a list, one value a rank, or the value of
        `unique_reply_rank`.

        `method` is the name of an `@rpc` method, or a function, called in each worker as f(worker, *args, **kwargs).
        Values arrive as builtins and arrays; `msgspec.convert` restores a type.
        Raises `InvalidRequestError` for arguments that cannot be sent, `EngineDeadError`.
        """
        return self.forward(EncodedCall.of(method, args, kwargs, timeout, unique_reply_rank, by_engine=True))

    @abstractmethod
    def forward(self, call: EncodedCall) -> RpcFuture:
        """`submit` with encoded arguments; `call.by_engine` says whether the engine itself makes the call. The caller
        may change the buffers after it returns. Workers refuse engine-scope methods to any other call."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        """Broadcasts a step; the future's result is the output rank's `ModelRunnerOutput`."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """The result of `submit`."""
        return self.submit(method, args, kwargs, timeout, unique_reply_rank).result()

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


def check_reply_rank(rank: int | None, num_ranks: int) -> None:
    """Raises `InvalidRequestError` for an invalid `unique_reply_rank`."""
    if rank is None or (type(rank) is int and 0 <= rank < num_ranks):
        return
    raise InvalidRequestError(
        f"unique_reply_rank={rank!r}: give None, or a rank from 0 to {num_ranks - 1}",
        field="unique_reply_rank",
        value=repr(rank),
    )
