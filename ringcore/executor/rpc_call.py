"""A call of the workers: its signature, once, and the record that carries its arguments.

    collective_rpc(...)  ──▶ WorkerCall ──encoded──▶ EncodedCall ──▶ executor     in the engine's process
                                                   ╰▶ RpcCall + buffers ──▶ EncodedCall ──▶ ...    from a client

How a call is executed, `CallOptions`, is a part of each record. A new option is a field there and a parameter here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ringcore.errors import InvalidRequestError
from ringcore.executor.callables import callable_name
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.value_codec import encode_request
from ringcore.executor.wire import CALL, CALLABLE, CallHead
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.messages import CallOptions

__all__ = ["EncodedCall", "RpcCaller", "RpcFuture", "RpcSubmitter", "WorkerCall", "check_reply_rank"]

Method = str | Callable[..., Any]


class EncodedCall(CallOptions, frozen=True):
    """A call with its arguments encoded, for `Executor.forward`.

    method: the name, also that of a callable. parts: the result of `value_codec.encode_request`. is_callable: `parts`
    hold a packed function in place of a name. by_engine: the engine itself makes the call, so it may call
    `@rpc(scope="engine")` methods; never set for a client's call.
    """

    method: str
    parts: Sequence[Buffer]
    is_callable: bool = False
    by_engine: bool = False

    def head(self, call_id: int = 0) -> CallHead:
        """The call's envelope."""
        kind = CALLABLE if self.is_callable else CALL
        return CallHead(call_id, kind, self.unique_reply_rank, self.method, self.by_engine)


class WorkerCall(CallOptions, frozen=True):
    """The arguments of `collective_rpc`."""

    method: Method
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None

    def encoded(self, by_engine: bool = False) -> EncodedCall:
        """Raises `InvalidRequestError` for an invalid method or timeout, and for arguments that cannot be sent."""
        check_timeout("timeout", self.timeout_s)
        parts = encode_request(self.method, self.args, self.kwargs)
        name = self.method if isinstance(self.method, str) else callable_name(self.method)
        return EncodedCall(name, parts, not isinstance(self.method, str), by_engine, **self.options())


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


class RpcCaller(ABC):
    """Whatever can call the workers."""

    @abstractmethod
    def call_workers(self, call: WorkerCall) -> Any:
        """`collective_rpc` of these arguments."""

    def collective_rpc(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Calls an `@rpc` method on every worker; one value per rank, in rank order, or `unique_reply_rank`'s alone.
        An `AsyncEngine`'s is awaited.

        method: a name; or, with the option `allow_callables`, a function that each worker calls as
            f(worker, *args, **kwargs).
        timeout: seconds; None waits for the result or the engine's death. An `AdminClient` waits 30 s then.
        unique_reply_rank: every rank executes the call, only this one replies.

        Values arrive as builtins and arrays, tensors as `HostTensor`; `msgspec.convert` restores a type.
        Raises `WorkerError` if the method raised (its `failures` are those of all ranks), `WorkerDiedError` if a worker
        died during the call and was replaced, `RpcTimeoutError` after `timeout` seconds, `InvalidRequestError` for an
        unknown method, one that only the engine may call, and arguments that cannot be sent. The engine stays alive.
        """
        return self.call_workers(
            WorkerCall(method, args, kwargs, timeout_s=timeout, unique_reply_rank=unique_reply_rank)
        )


class RpcSubmitter(RpcCaller):
    """A caller that need not wait for the result."""

    @abstractmethod
    def submit(self, call: WorkerCall) -> RpcFuture:
        """`submit_rpc` of these arguments."""

    def submit_rpc(
        self,
        method: Method,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        unique_reply_rank: int | None = None,
    ) -> RpcFuture:
        """Broadcasts a call to the workers, which execute it after the steps in flight. Arguments, value and errors are
        those of `collective_rpc`."""
        return self.submit(WorkerCall(method, args, kwargs, timeout_s=timeout, unique_reply_rank=unique_reply_rank))

    def call_workers(self, call: WorkerCall) -> Any:
        return self.submit(call).result()


def check_reply_rank(rank: int | None, num_ranks: int) -> None:
    """Raises `InvalidRequestError` for an invalid `unique_reply_rank`."""
    if rank is None or (type(rank) is int and 0 <= rank < num_ranks):
        return
    raise InvalidRequestError(
        f"unique_reply_rank={rank!r}: give None, or a rank from 0 to {num_ranks - 1}",
        field="unique_reply_rank",
        value=repr(rank),
    )
