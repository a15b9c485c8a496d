"""Applies the engine's outputs to the unfinished completions, which it keeps by engine id."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ringcore.front_end.input_processor import PreparedRequest
from ringcore.front_end.observers import FrontEndObserver
from ringcore.front_end.request_state import Completion, RequestState, TextSource
from ringcore.params.sampling_params import OutputKind
from ringcore.protocol.requests import EngineCoreOutput

__all__ = ["OutputProcessor", "ProcessedOutputs"]


@dataclass(slots=True)
class ProcessedOutputs:
    """The result of one message of the engine."""

    changed: list[RequestState] = field(default_factory=list)  # requests that have an output to take
    abort_ids: list[str] = field(default_factory=list)  # ended by a stop string, or by another completion's error
    num_new_tokens: int = 0


class OutputProcessor:
    """Holds the unfinished completions.

    It drops outputs of others: a completion that a stop string ended is forgotten at once, while the engine may still
    have a step in flight for it. One thread processes; others may add and forget concurrently, since each of these is
    one atomic operation on the dict, which needs no lock and may run in a finalizer.
    """

    def __init__(self, tokenizer: TextSource, observers: Sequence[FrontEndObserver] = ()) -> None:
        self._tokenizer, self._observers = tokenizer, observers
        self._completions: dict[str, Completion] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._completions)

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._completions)

    @property
    def unfinished(self) -> list[RequestState]:
        return list(dict.fromkeys(completion.request for completion in list(self._completions.values())))

    def add(self, prepared: PreparedRequest, kind: OutputKind = "final") -> RequestState:
        """Registers a request's completions."""
        state = RequestState(prepared, self._tokenizer, kind, self._observers)
        for completion in state.completions:
            assert completion.engine_id not in self._completions, f"request {completion.engine_id!r} is unfinished"
            self._completions[completion.engine_id] = completion
        return state

    def forget(self, engine_ids: Iterable[str]) -> None:
        """Ignores later outputs of these completions."""
        for engine_id in engine_ids:
            self._completions.pop(engine_id, None)

    def process(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Applies one message of the engine; forgets the completions that ended."""
        processed, now = ProcessedOutputs(), time.monotonic()
        changed: dict[int, RequestState] = {}  # by id(): a fast hash, and unique while `changed` references the states
        for output in outputs:
            completion = self._completions.get(output.request_id)
            if completion is None:
                continue
            state = completion.request
            num_new, has_output = state.update(completion, output, now)
            processed.num_new_tokens += num_new
            if has_output:
                changed[id(state)] = state
            if completion.finish_reason is not None:
                self._forget_ended(completion, output, processed)
        processed.changed = list(changed.values())
        return processed

    def _forget_ended(self, completion: Completion, output: EngineCoreOutput, processed: ProcessedOutputs) -> None:
        if self._completions.pop(completion.engine_id, None) is not None and output.finish_reason is None:
            processed.abort_ids.append(completion.engine_id)
        if completion.request.is_over:  # the other completions have ended, or fail with this one
            for other in completion.request.completions:
                if self._completions.pop(other.engine_id, None) is not None:
                    processed.abort_ids.append(other.engine_id)
