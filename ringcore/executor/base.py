"""The seam between the engine and its workers."""

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

    method: the name, also that of a callable. parts: what `value_codec.encode_request` gave. is_callable: `parts` hold
    a packed function in place of a name. timeout: seconds from the submission; None waits for result or death.
    unique_reply_rank: every rank executes the call, this one alone replies; None: all do. by_engine: the engine itself
    makes the call, and so may call what is declared with `@rpc(scope="engine")`; never set for a call from outside.
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
        """Raises `InvalidRequestError` for a method that is none, a timeout that is none, and for arguments that cannot
        be sent."""
        check_timeout("timeout", timeout)
        parts = encode_request(method, args, kwargs)
        name = method if isinstance(method, str) else callable_name(method)
        return cls(name, parts, not isinstance(method, str), timeout, unique_reply_rank, by_engine)

    def head(self, call_id: int = 0) -> CallHead:
        """The call's envelope."""
        kind = CALLABLE if self.is_callable else CALL
        return CallHead(call_id, kind, self.unique_reply_rank, self.method, self.by_engine)


class RpcFuture(Protocol):
    """A call under way."""

    def done(self) -> bool:
        """Whether `result` would return (or raise) at once. Takes in what has arrived; never blocks."""
        ...

    def result(self, timeout: float | None = None) -> Any:
        """The call's value. Ends on the result, the death of a worker, or the deadline, whichever is first.

        Raises the error of the lowest rank that failed, whose `failures` have those of all; `EngineDeadError`; or
        `RpcTimeoutError`. A value that cannot be decoded is a `WorkerError`.
        """
        ...

    def encoded_result(self) -> list[list[Buffer]]:
        """The buffers of each value, in the order of the replying ranks, undecoded. Waits and raises as `result`."""
        ...


class Executor(ABC):
    """Starts the workers of one engine and calls their methods.

    Every call is one broadcast and a gather of replies in rank order. Calls are executed by each worker in the
    order in which they were submitted, except those of read-only methods, which need not wait for the others.
    `timeout` is in seconds from the submission; None waits for result or death.

    methods: what every worker declares with `@rpc`, by name; set by `start` and `restart`. What is not in it cannot be
    called from outside.
    on_wait: called again and again while a call waits for room in the queue to the workers, who are busy.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.methods: Mapping[str, RpcMethod] = {}
        self.on_wait: Callable[[], None] = lambda: None

    @abstractmethod
    def start(self) -> dict[str, float]:
        """Starts every worker and returns when all have their device and model. Raises what stopped a worker.

        Returns the seconds of its phases, in order: "start_workers", "init_device", "load_model"; behind each, as
        "load_model.weights", what the workers tell of its parts, which may overlap.
        """

    @abstractmethod
    def restart(self) -> dict[str, float]:
        """Ends what is left of the workers at once and starts new ones, as `start` does.

        Futures of before stay failed, or fail now. Other descriptors are in `wait_fds` then. Raises what stopped a
        new worker, after which it may be called again; `EngineDeadError` after `shutdown`.
        """

    def submit(
        self,
        method: str | Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> RpcFuture:
        """Broadcasts a call of the engine's own; the future's result is a list, one value a rank, or the
        `unique_reply_rank`'s value.

        `method` is the name of an `@rpc` method, or a function, called in each worker as f(worker, *args, **kwargs).
        Values arrive as builtins and arrays, whatever they were; `msgspec.convert` makes a type of them again.
        Raises `InvalidRequestError` for what cannot be sent, `EngineDeadError`.
        """
        return self.forward(EncodedCall.of(method, args, kwargs, timeout, unique_reply_rank, by_engine=True))

    @abstractmethod
    def forward(self, call: EncodedCall) -> RpcFuture:
        """`submit` with the arguments encoded already; `call.by_engine` says whether it is a call of the engine's own.
        Their buffers may be changed as soon as it returns. What only the engine may call, each worker refuses to any
        other call."""

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
        """The processes by name, e.g. {"worker 0": 4711}; empty where the worker lives in this one."""

    @abstractmethod
    def check(self) -> None:
        """Raises `EngineDeadError` if a worker has died; else returns at once."""

    @abstractmethod
    def health(self) -> list[RankHealth]:
        """How each worker does, as far as can be seen without asking it. Never waits."""

    @abstractmethod
    def oldest_step_s(self) -> float | None:
        """How long the oldest step under way has taken so far, in seconds; None where there is none. Never waits."""

    @abstractmethod
    def diagnose(self) -> str:
        """What each worker does and where in its code it is, for a person. Disturbs none; takes up to 0.5 s a rank."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees what they held. Idempotent; pending futures raise `EngineDeadError`."""


def check_reply_rank(rank: int | None, num_ranks: int) -> None:
    """Raises `InvalidRequestError` for a `unique_reply_rank` that is no rank."""
    if rank is None or (type(rank) is int and 0 <= rank < num_ranks):
        return
    raise InvalidRequestError(
        f"unique_reply_rank={rank!r}: give None, or a rank from 0 to {num_ranks - 1}",
        field="unique_reply_rank",
        value=repr(rank),
    )
