"""An engine as `ringcore top` sees it: it can be asked, told, and chosen from a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from ringcore.cli.dump import write_dump
from ringcore.cli.engines import EngineAddress
from ringcore.cli.top.sample import Sample, WorkerSample
from ringcore.errors import InvalidRequestError, RingcoreError, RpcTimeoutError, WorkerDiedError
from ringcore.protocol.introspection import EngineSnapshot

if TYPE_CHECKING:
    from ringcore.front_end.admin_client import AdminClient

__all__ = ["Action", "AdminSource", "Choice", "EngineSource", "Engines"]

_ANSWER_S = 2.0  # an engine that needs longer is told to be silent, and asked again
_WORKERS_S = 1.0
_SURVEY_S = 0.1
_ACT_S = 60.0
_SIZES = 50, 1024  # requests, cells of the block map
_MEMORY_EVERY = 5  # samples: the memory table takes longer than the rest


class Action(NamedTuple):
    """A call to the engine itself that changes something."""

    method: str
    args: tuple[Any, ...] = ()


class EngineSource(Protocol):
    """One engine. `sample` on one side, `act` and `dump` on the other may be called by two threads at once."""

    def sample(self) -> Sample:
        """Raises `RpcTimeoutError` if the engine is silent, another `RingcoreError` if it has ended or refuses."""
        ...

    def act(self, action: Action) -> object:
        """Its value. Raises `RingcoreError`."""
        ...

    def dump(self) -> Path:
        """Writes a file. Raises OSError."""
        ...

    def close(self) -> None: ...


class Choice(NamedTuple):
    """An engine to choose. connect: raises `RingcoreError`."""

    name: str
    description: str
    connect: Callable[[], EngineSource]


Engines = Callable[[], Sequence[Choice]]  # those that can be chosen now


class AdminSource:
    """An engine over its admin socket or endpoint: a connection for samples, and one for calls that may take long.

    The constructor connects. Raises `RingcoreError`.
    """

    def __init__(self, address: EngineAddress) -> None:
        self._address = address
        self._client = address.connect()
        self._actor: AdminClient | None = None
        self._num_samples = 0
        self._memory: list[dict[str, Any]] = []
        self._device: str | None = None

    def sample(self) -> Sample:
        try:
            told = self._client.call_engine("snapshot", _SIZES, timeout=_ANSWER_S)
        except RpcTimeoutError as error:
            raise self._explained(error) from error
        engine = msgspec.convert(told, EngineSnapshot)
        try:
            workers = self._ask_workers()
        except RpcTimeoutError:
            return Sample(engine, [], f"no answer within {_WORKERS_S:.0f} s", self._device)
        except WorkerDiedError as error:
            return Sample(engine, [], error.message, self._device)
        return Sample(engine, workers, None, self._device)

    def _explained(self, error: RpcTimeoutError) -> RpcTimeoutError:
        """With what the kernel and the shared memory of an engine on this host say."""
        from ringcore.front_end.engine_survey import survey

        if self._address.local is not None:
            (report,) = survey([self._address.local], _SURVEY_S)
            if report.detail is not None:
                return RpcTimeoutError(report.detail, **error.details)
        return error

    def _ask_workers(self) -> list[WorkerSample]:
        """Over the control channel of each, so that no step waits."""
        usage = self._ask_all("stats")
        if self._num_samples % _MEMORY_EVERY == 0:
            self._memory = self._ask_all("memory")
            self._device = next((one.get("device") for one in self._ask_all("health")), None)
        self._num_samples += 1
        none: dict[str, Any] = {}
        both = zip_longest(usage, self._memory, fillvalue=none)
        return [WorkerSample(rank, *of_rank) for rank, of_rank in enumerate(both)]

    def _ask_all(self, method: str) -> list[dict[str, Any]]:
        """By rank; empty for a custom worker class without the method."""
        try:
            values: list[dict[str, Any]] = self._client.collective_rpc(method, timeout=_WORKERS_S)
        except InvalidRequestError:
            return []
        return values

    def act(self, action: Action) -> object:
        if self._actor is None:
            self._actor = self._address.connect()
        try:
            return self._actor.call_engine(action.method, action.args, timeout=_ACT_S)
        except RingcoreError:
            actor, self._actor = self._actor, None
            actor.close()
            raise

    def dump(self) -> Path:
        return write_dump(self._address)

    def close(self) -> None:
        self._client.close()
        if self._actor is not None:
            self._actor.close()
