"""Admission gate of requests with structured outputs: a request waits here until its grammar has compiled.

add ─▶ known grammar ─────────────────────────────────────────────────────▶ the scheduler's waiting queue
   └▶ new grammar: GrammarCompiler ─▶ compile_grammar on every worker's control channel ─▶ ┘
                   └ or the request's error           └ or the request's error
"""

from __future__ import annotations

import select
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Protocol

from ringcore.config import EngineConfig
from ringcore.engine_core.grammar_compiler import CompileResult, GrammarCompiler
from ringcore.errors import EngineDeadError, InvalidRequestError, RingcoreError, WorkerDiedError
from ringcore.executor.rpc_call import RpcFuture
from ringcore.grammars import grammar_key
from ringcore.grammars.grammars import MAX_CACHED
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.protocol.introspection import RequestReport
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest
from ringcore.scheduler.failures import failure, id_in_use
from ringcore.scheduler.request import Request
from ringcore.scheduler.view import report_of

__all__ = ["Compiler", "GrammarGate", "Queue"]

_MAX_DEATHS = 2  # deaths of workers while they compile one grammar; a single death may have another cause
_WORKER_TIMEOUT_FACTOR = 3.0  # times the compiler's deadline: workers also execute steps
_POLL_S = 0.02


class Compiler(Protocol):
    """`GrammarCompiler`, as the gate uses it."""

    @property
    def is_busy(self) -> bool: ...

    @property
    def has_unreaped(self) -> bool: ...

    @property
    def fds(self) -> list[int]: ...

    def compile(self, spec: StructuredOutputsParams) -> None: ...

    def poll(self) -> CompileResult | None: ...

    def cancel(self) -> None: ...

    def close(self) -> None: ...


class Queue(Protocol):
    """`Scheduler`, as the gate uses it. num_at_gate: number of requests at the gate."""

    num_at_gate: int

    def add_request(self, request: EngineCoreRequest) -> None: ...

    def admit(self, request: EngineCoreRequest) -> Request: ...

    def enqueue(self, admitted: Request) -> None: ...


class _Grammar:
    """A grammar that has not compiled yet, and the requests that wait for it, in order of arrival."""

    def __init__(self, key: str, spec: StructuredOutputsParams) -> None:
        self.key, self.spec = key, spec
        self.requests: dict[str, Request] = {}
        self.is_compiling = False  # in the compiler process
        self.is_compiled = False  # the compiler process succeeded
        self.future: RpcFuture | None = None  # of `compile_grammar` on the workers
        self.num_deaths = 0


class GrammarGate:
    """Non-blocking: `drive` advances every grammar as far as it can without waiting.

    compile_on_workers: calls `compile_grammar` on each worker with a deadline in seconds. pending_outputs: receives the
    last outputs of requests whose grammar is rejected.

    Invariant: `_waiting` maps each waiting request to its grammar in `_new`, which lists the request too; a grammar is
    in `_new` or in `_known`, never in both.
    """

    def __init__(
        self,
        config: EngineConfig,
        queue: Queue,
        compile_on_workers: Callable[[StructuredOutputsParams, float], RpcFuture],
        pending_outputs: list[EngineCoreOutput],
        compiler: Compiler | None = None,
    ) -> None:
        self._queue, self._compile_on_workers, self._pending_outputs = queue, compile_on_workers, pending_outputs
        self._compiler: Compiler = compiler or GrammarCompiler(config)
        self._timeout_s = config.scheduler.structured_outputs_timeout_s
        self._waiting: dict[str, _Grammar] = {}
        self._new: dict[str, _Grammar] = {}
        self._known: OrderedDict[str, None] = OrderedDict()  # LRU: the least recently used first

    def __bool__(self) -> bool:
        """Whether a request waits at the gate."""
        return bool(self._waiting)

    @property
    def is_working(self) -> bool:
        """Whether `drive` has work now or soon."""
        return bool(self._new) or self._compiler.has_unreaped

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._waiting)

    def reports(self, num: int, now_s: float) -> list[RequestReport]:
        """The first `num` requests that wait, for those who ask."""
        requests = (grammar.requests[request_id] for request_id, grammar in islice(self._waiting.items(), num))
        return [report_of(request, "compiling", now_s) for request in requests]

    @property
    def fds(self) -> list[int]:
        """Descriptors that become readable when the compiler progresses; none while no request waits."""
        return self._compiler.fds if self._waiting else []

    def wait(self, fds: Sequence[int]) -> None:
        """Waits until one of these is readable, or for a poll interval: deadlines signal no descriptor."""
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.poll(_POLL_S * 1e3)

    # -----------------------------------------------------------------------------------------------------------
    # Requests.

    def add(self, request: EngineCoreRequest) -> None:
        """Queues a request, or keeps it at the gate. Raises `InvalidRequestError` (or `CapacityError`) for an invalid
        one."""
        if request.request_id in self._waiting:
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
        self._waiting[admitted.request_id] = grammar
        self._queue.num_at_gate = len(self._waiting)

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """Aborts those of these requests that wait at the gate; returns the last output of each."""
        outputs = []
        for request_id in request_ids:
            if (grammar := self._waiting.get(request_id)) is not None:
                outputs.append(self._release(grammar, request_id).to_output([], finish_reason="abort"))
                if not grammar.requests:
                    self._forget(grammar)
        return outputs

    def _forget(self, grammar: _Grammar) -> None:
        """Forgets a grammar whose requests were all aborted, and cancels its compilation."""
        del self._new[grammar.key]
        if grammar.is_compiling:
            self._compiler.cancel()

    def _release(self, grammar: _Grammar, request_id: str) -> Request:
        del self._waiting[request_id]
        self._queue.num_at_gate = len(self._waiting)
        return grammar.requests.pop(request_id)

    # -----------------------------------------------------------------------------------------------------------
    # Grammars.

    def drive(self) -> None:
        """Advances all grammars. Raises `EngineDeadError` if the workers are lost and not replaced."""
        if not self._new and not self._compiler.has_unreaped:
            return
        self._poll_compiler()
        self._start_next()
        for grammar in [one for one in self._new.values() if one.is_compiled]:
            self._poll_workers(grammar)

    def _poll_compiler(self) -> None:
        result = self._compiler.poll()
        if result is None:
            return
        grammar = next(one for one in self._new.values() if one.is_compiling)
        grammar.is_compiling = False
        if result.error is not None:
            self._reject(grammar, result.error)
        else:
            grammar.is_compiled = True

    def _start_next(self) -> None:
        while not self._compiler.is_busy:
            grammar = next((one for one in self._new.values() if not one.is_compiled), None)
            if grammar is None:
                return
            try:
                self._compiler.compile(grammar.spec)
                grammar.is_compiling = True
            except RingcoreError as error:
                self._reject(grammar, error)

    def _poll_workers(self, grammar: _Grammar) -> None:
        try:
            if grammar.future is None:
                grammar.future = self._compile_on_workers(grammar.spec, _WORKER_TIMEOUT_FACTOR * self._timeout_s)
            if not grammar.future.done():
                return
            grammar.future.result()
        except WorkerDiedError as error:
            grammar.future = None
            grammar.num_deaths += 1
            if grammar.num_deaths >= _MAX_DEATHS:
                self._reject(grammar, _killed_workers(grammar.spec, error))
        except EngineDeadError:
            raise
        except RingcoreError as error:
            self._reject(grammar, error)
        else:
            self._admit(grammar)

    def _admit(self, grammar: _Grammar) -> None:
        del self._new[grammar.key]
        self._known[grammar.key] = None
        while len(self._known) > MAX_CACHED:
            self._known.popitem(last=False)
        for request_id in list(grammar.requests):
            request = self._release(grammar, request_id)
            try:
                self._queue.enqueue(request)
            except RingcoreError as error:
                self._pending_outputs.append(failure(request, error))

    def _reject(self, grammar: _Grammar, error: RingcoreError) -> None:
        del self._new[grammar.key]
        for request_id in list(grammar.requests):
            self._pending_outputs.append(failure(self._release(grammar, request_id), error))

    def workers_replaced(self) -> None:
        """New workers have no compiled grammars. The compiler process need not check the known ones again, but one of
        them may have killed the workers, so each is sent through the gate again."""
        self._known.clear()

    def close(self) -> None:
        """Ends the compiler. Idempotent; the waiting requests are dropped without an output."""
        self._compiler.close()

    def check(self) -> None:
        """Asserts the invariant; for tests."""
        waiting = {request_id: one for one in self._new.values() for request_id in one.requests}
        assert waiting == self._waiting, "a request is lost, or waits twice"
        assert not self._new.keys() & self._known.keys(), "a grammar is known and new"
        assert sum(one.is_compiling for one in self._new.values()) == self._compiler.is_busy
        assert self._queue.num_at_gate == len(self._waiting)


def _killed_workers(spec: StructuredOutputsParams, error: RingcoreError) -> InvalidRequestError:
    field = f"structured_outputs.{spec.kind}"
    return InvalidRequestError(
        f"{field}: the workers died {_MAX_DEATHS} times while they compiled it; simplify it: {error.message}",
        field=field,
        value=None,
    )
