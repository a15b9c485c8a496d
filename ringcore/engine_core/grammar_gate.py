"""Requests with structured outputs, held until their grammar is known to compile.

add ─▶ the grammar is known ──────────────────────────────────────────────▶ the scheduler's queue
   └▶ it is new: GrammarCompiler ─▶ compile_grammar on every worker, aside ─▶ ┘
                 └ or the request's error           └ or the request's error
"""

from __future__ import annotations

import select
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ringcore.config import EngineConfig
from ringcore.engine_core.grammar_compiler import GrammarCompiler, Verdict
from ringcore.errors import EngineDeadError, InvalidRequestError, RingcoreError, WorkerDiedError
from ringcore.executor.base import RpcFuture
from ringcore.grammars import grammar_key
from ringcore.grammars.grammars import MAX_CACHED
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest
from ringcore.scheduler.failures import failure, id_in_use
from ringcore.scheduler.request import Request

__all__ = ["Compiler", "GrammarGate", "Queue"]

_MAX_DEATHS = 2  # of workers that compile it; one may have another cause
_WORKERS_PATIENCE = 3.0  # times the compiler's deadline: workers have more to do
_TICK_S = 0.02


class Compiler(Protocol):
    """`GrammarCompiler`, as the gate uses it."""

    @property
    def is_busy(self) -> bool: ...

    @property
    def is_ending(self) -> bool: ...

    @property
    def fds(self) -> list[int]: ...

    def compile(self, spec: StructuredOutputsParams) -> None: ...

    def poll(self) -> Verdict | None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Queue(Protocol):
    """`Scheduler`, as the gate uses it. num_held: how many requests the gate holds."""

    num_held: int

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def admit(self, request: EngineCoreRequest) -> Request: ...

    def enqueue(self, admitted: Request) -> None: ...


class _Grammar:
    """A grammar that is not known yet, and the requests that wait for it, in the order of arrival."""

    def __init__(self, key: str, spec: StructuredOutputsParams) -> None:
        self.key, self.spec = key, spec
        self.requests: dict[str, Request] = {}
        self.is_compiling = False  # it is the compiler's turn
        self.is_checked = False  # the compiler could
        self.future: RpcFuture | None = None  # of the workers
        self.num_deaths = 0


class GrammarGate:
    """Nothing here waits; `drive` goes on as far as is possible.

    compile_on_workers: calls `compile_grammar` of each with a deadline in seconds. untold: where the last outputs of
    requests go whose grammar is refused.

    Invariant: `_held` has each request that waits, and the grammar in `_new` that has it too; a grammar is in `_new` or
    in `_known`, never in both.
    """

    def __init__(
        self,
        config: EngineConfig,
        queue: Queue,
        compile_on_workers: Callable[[StructuredOutputsParams, float], RpcFuture],
        untold: list[EngineCoreOutput],
        compiler: Compiler | None = None,
    ) -> None:
        self._queue, self._compile_on_workers, self._untold = queue, compile_on_workers, untold
        self._compiler: Compiler = compiler or GrammarCompiler(config)
        self._timeout_s = config.scheduler.structured_outputs_timeout_s
        self._held: dict[str, _Grammar] = {}
        self._new: dict[str, _Grammar] = {}
        self._known: OrderedDict[str, None] = OrderedDict()  # the least recently used first

    def __bool__(self) -> bool:
        """Whether a request is held."""
        return bool(self._held)

    @property
    def is_working(self) -> bool:
        """Whether `drive` has something to do, now or before long."""
        return bool(self._new) or self._compiler.is_ending

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._held)

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when the compiler has got on; none while no request is held."""
        return self._compiler.fds if self._held else []

    def wait(self, fds: Sequence[int]) -> None:
        """Until one of these is readable, or for a moment: deadlines come to no descriptor."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.poll(_TICK_S * 1e3)

    # -----------------------------------------------------------------------------------------------------------
    # Requests.

    def add(self, request: EngineCoreRequest) -> None:
        """Queues a request, or holds it. Raises `InvalidRequestError` (or `CapacityError`) where it is wrong."""
        if request.request_id in self._held:
            raise id_in_use(request.request_id)
        spec = request.sampling_params.structured_outputs
        if spec is None:
            self._queue.add_request(request)
            return
        key = grammar_key(spec)
        if key in self._known:
            self._known.move_to_end(key)
            self._queue.add_request(request)
            return
        admitted = self._queue.admit(request)
        grammar = self._new.setdefault(key, _Grammar(key, spec))
        grammar.requests[admitted.request_id] = admitted
        self._held[admitted.request_id] = grammar
        self._queue.num_held = len(self._held)

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Ends those of these that are held; the last output of each."""
        outputs = []
        for request_id in request_ids:
            if (grammar := self._held.get(request_id)) is not None:
                outputs.append(self._let_go(grammar, request_id).to_output([], finish_reason="abort"))
                if not grammar.requests:
                    self._drop(grammar)
        return outputs

    def _drop(self, grammar: _Grammar) -> None:
        """All who asked for it have left; nobody would look after the work on it."""
        del self._new[grammar.key]
        if grammar.is_compiling:
            self._compiler.cancel()

    def _let_go(self, grammar: _Grammar, request_id: str) -> Request:
        del self._held[request_id]
        self._queue.num_held = len(self._held)
        return grammar.requests.pop(request_id)

    # -----------------------------------------------------------------------------------------------------------
    # Grammars.

    def drive(self) -> None:
        """Raises `EngineDeadError` where the workers are lost for good."""
        if not self._new and not self._compiler.is_ending:
            return
        self._take_verdict()
        self._begin_next()
        for grammar in [one for one in self._new.values() if one.is_checked]:
            self._ask_workers(grammar)

    def _take_verdict(self) -> None:
        verdict = self._compiler.poll()
        if verdict is None:
            return
        grammar = next(one for one in self._new.values() if one.is_compiling)
        grammar.is_compiling = False
        if verdict.error is not None:
            self._refuse(grammar, verdict.error)
        else:
            grammar.is_checked = True

    def _begin_next(self) -> None:
        while not self._compiler.is_busy:
            grammar = next((one for one in self._new.values() if not one.is_checked), None)
            if grammar is None:
                return
            try:
                self._compiler.compile(grammar.spec)
                grammar.is_compiling = True
            except RingcoreError as error:
                self._refuse(grammar, error)

    def _ask_workers(self, grammar: _Grammar) -> None:
        try:
            if grammar.future is None:
                grammar.future = self._compile_on_workers(grammar.spec, _WORKERS_PATIENCE * self._timeout_s)
            if not grammar.future.done():
                return
            grammar.future.result()
        except WorkerDiedError as error:
            grammar.future = None
            grammar.num_deaths += 1
            if grammar.num_deaths >= _MAX_DEATHS:
                self._refuse(grammar, _killed_workers(grammar.spec, error))
        except EngineDeadError:
            raise
        except RingcoreError as error:
            self._refuse(grammar, error)
        else:
            self._pass(grammar)

    def _pass(self, grammar: _Grammar) -> None:
        del self._new[grammar.key]
        self._known[grammar.key] = None
        while len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)
        for request_id in list(grammar.requests):
            request = self._let_go(grammar, request_id)
            try:
                self._queue.enqueue(request)
            except RingcoreError as error:
                self._untold.append(failure(request, error))

    def _refuse(self, grammar: _Grammar, error: RingcoreError) -> None:
        del self._new[grammar.key]
        for request_id in list(grammar.requests):
            self._untold.append(failure(self._let_go(grammar, request_id), error))

    def workers_replaced(self) -> None:
        """The new workers know no grammar. Those that are known to compile need not be compiled before again; but
        whether a worker lives through one is another matter, so each is asked anew."""
        self._known.clear()

    def close(self) -> None:
        """Ends the compiler. Idempotent; the requests are nobody's any more."""
        self._compiler.close()

    def check(self) -> None:
        """Asserts the invariant; for tests."""
        held = {request_id: one for one in self._new.values() for request_id in one.requests}
        assert held == self._held, "a request is lost, or held twice"
        assert not self._new.keys() & self._known.keys(), "a grammar is known and new"
        assert sum(one.is_compiling for one in self._new.values()) == self._compiler.is_busy
        assert self._queue.num_held == len(self._held)


def _killed_workers(spec: StructuredOutputsParams, error: RingcoreError) -> InvalidRequestError:
    field = f"structured_outputs.{spec.kind}"
    return InvalidRequestError(
        f"{field}: the workers died {_MAX_DEATHS} times while they compiled it; simplify it: {error.message}",
        field=field,
        value=None,
    )
