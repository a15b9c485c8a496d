"""What the engine put out for a request becomes what its caller gets: text, log-probabilities, metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ringcore.engine_core.detokenizer import Detokenizer, TokenStream
from ringcore.errors import RingcoreError, error_from_wire
from ringcore.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from ringcore.protocol import EngineCoreOutput, EngineCoreRequest, TokenLogprobs, WireError

__all__ = ["OutputProcessor", "ProcessedOutputs", "error_of"]


class TextSource(Protocol):
    """What is needed of a `Tokenizer`."""

    def stream(self, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> TokenStream: ...

    def token_text(self, token_id: int) -> str: ...


@dataclass(slots=True)
class ProcessedOutputs:
    """What one message of the engine came to."""

    finished: dict[str, RequestOutput] = field(default_factory=dict)  # by the engine's request id
    abort_ids: list[str] = field(default_factory=list)  # ended by a stop string: the engine does not know yet
    num_new_tokens: int = 0


class OutputProcessor:
    """Holds the requests that are under way, by the id that the engine knows them by.

    Outputs of other ids are dropped: a request that a stop string ended is forgotten at once, while the engine
    may still have a step in flight for it.
    """

    def __init__(self, tokenizer: TextSource) -> None:
        self._tokenizer = tokenizer
        self._states: dict[str, _RequestState] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._states)

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._states)

    def add_request(self, request: EngineCoreRequest, *, request_id: str, prompt: str | None) -> None:
        """Expects outputs for `request`. `request_id` is the caller's own name for it, and the result's."""
        assert request.request_id not in self._states, f"request {request.request_id!r} is under way"
        self._states[request.request_id] = _RequestState(request, request_id, prompt, self._tokenizer)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops requests whose outputs nobody waits for."""
        for request_id in request_ids:
            self._states.pop(request_id, None)

    def process(self, outputs: Iterable[EngineCoreOutput]) -> ProcessedOutputs:
        """Takes in one message of the engine; a request that it finished is handed over and forgotten."""
        processed, now = ProcessedOutputs(), time.monotonic()
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:
                continue
            processed.num_new_tokens += state.update(output, now)
            if state.finish_reason is None:
                continue
            del self._states[output.request_id]
            processed.finished[output.request_id] = state.result(now)
            if output.finish_reason is None:
                processed.abort_ids.append(output.request_id)
        return processed


class _RequestState:
    """One request under way."""

    def __init__(self, request: EngineCoreRequest, request_id: str, prompt: str | None, tokenizer: TextSource) -> None:
        params = request.sampling_params
        self.finish_reason: FinishReason | None = None
        self._request, self._request_id, self._prompt = request, request_id, prompt
        self._token_text = tokenizer.token_text
        self._detokenizer = Detokenizer(tokenizer.stream(params.skip_special_tokens, request.prompt_token_ids), params)
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._stop_reason: int | str | None = None
        self._first_token_s: float | None = None
        self._last: EngineCoreOutput | None = None

    def update(self, output: EngineCoreOutput, now: float) -> int:
        """Takes in an output; returns how many of its tokens belong to the completion."""
        self._last = output
        num_before = len(self._token_ids)
        stop = self._append_tokens(output)
        if self._token_ids and self._first_token_s is None:
            self._first_token_s = now
        if stop is None and output.finish_reason is not None:
            stop = self._detokenizer.finish()
        if stop is not None and output.error is None:
            self.finish_reason, self._stop_reason = "stop", stop
        elif output.finish_reason is not None:
            self.finish_reason, self._stop_reason = output.finish_reason, output.stop_reason
        return len(self._token_ids) - num_before

    def _append_tokens(self, output: EngineCoreOutput) -> str | None:
        """Appends tokens up to the one that completes a stop string, which is returned."""
        last = len(output.new_token_ids) - 1
        for i, token_id in enumerate(output.new_token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is not None and output.logprobs is not None:
                self._append_logprobs(output.logprobs[i])
            is_stop_token = i == last and output.finish_reason == "stop"
            stop = self._detokenizer.append(token_id, is_stop_token=is_stop_token)
            if stop is not None:
                return stop
        return None

    def _append_logprobs(self, position: TokenLogprobs) -> None:
        assert self._logprobs is not None
        self._cumulative_logprob += position.logprobs[0]  # the sampled token comes first
        self._logprobs.append(
            {
                token_id: Logprob(logprob, rank, self._token_text(token_id))
                for token_id, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True)
            }
        )

    def result(self, now: float) -> RequestOutput:
        last = self._last
        assert last is not None
        completion = CompletionOutput(
            index=0,
            text=self._detokenizer.text,
            token_ids=self._token_ids,
            cumulative_logprob=None if self._logprobs is None else self._cumulative_logprob,
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )
        failed_at_once = last.error is not None and not self._token_ids
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._request.prompt_token_ids,
            outputs=[] if failed_at_once else [completion],
            num_cached_tokens=last.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_s=self._request.arrival_s,
                first_scheduled_s=last.first_scheduled_s,
                first_token_s=self._first_token_s,
                finished_s=now,
                num_preemptions=last.num_preemptions,
            ),
            error=None if last.error is None else error_of(last.error),
        )


def error_of(wire: WireError) -> RingcoreError:
    """The error that a message carries, to be raised or handed over here."""
    return error_from_wire({"type": wire.type, "message": wire.message, "details": wire.details})
