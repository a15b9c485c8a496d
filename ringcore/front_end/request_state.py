"""The state of one request: its completions, and the output that the reader has not taken yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ringcore.errors import InvalidRequestError, RingcoreError, error_from_wire
from ringcore.front_end.detokenizer import Detokenizer, NoText, TokenStream
from ringcore.front_end.input_processor import PreparedRequest
from ringcore.front_end.prompt_logprobs import PromptPositions, prompt_positions
from ringcore.metrics import EndedRequest
from ringcore.params.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from ringcore.params.sampling_params import OutputKind, SamplingParams
from ringcore.protocol.requests import EngineCoreOutput, EngineCoreRequest, TokenLogprobs, WireError

__all__ = ["Completion", "FirstTokenObserver", "RequestState", "TextSource", "error_of", "id_in_use"]


class TextSource(Protocol):
    """The part of a `Tokenizer` that detokenization needs."""

    def stream(self, skip_special_tokens: bool, prompt_ids: Sequence[int]) -> TokenStream: ...

    def token_text(self, token_id: int) -> str: ...


class FirstTokenObserver(Protocol):
    """The part of a front end's observer that a request calls."""

    def first_token(self, num_prompt_tokens: int, arrival_s: float, now: float) -> None: ...


class RequestState:
    """One request: its completions, until each has ended, or one has failed.

    The receiver thread calls `update`, the reader calls `take`, concurrently. Output that the reader has not taken is
    merged, at most the request's own tokens; so a slow reader exerts no back-pressure on the engine.

    kind: of the outputs of `take`. is_over: no more output will arrive; the last one can still be taken. submitted_s:
    when it was checked and tokenized (monotonic). trace_context: the caller's, by `RequestSpans`.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        tokenizer: TextSource,
        kind: OutputKind,
        observers: Sequence[FirstTokenObserver] = (),
    ) -> None:
        self.request_id = prepared.request_id
        self.completions = [
            Completion(self, i, one, prepared.prompt_token_ids, tokenizer) for i, one in enumerate(prepared.requests)
        ]
        self.is_over = False
        self.is_chat = prepared.is_chat
        self.submitted_s = time.monotonic()
        self.trace_context: object = None
        self._kind, self._observers = kind, observers
        self._prompt, self._prompt_token_ids = prepared.prompt, prepared.prompt_token_ids
        self._request = prepared.requests[0]
        self.error: RingcoreError | None = None
        self._token_text = tokenizer.token_text
        self._prompt_positions: PromptPositions | None = None
        if self._request.sampling_params.prompt_logprobs is not None and self.num_prompt_tokens == 1:
            self._prompt_positions = [None]  # the engine sends none for a prompt of one token
        self._pooled: np.ndarray | None = None
        self._first_token_s: float | None = None
        self._finished_s: float | None = None
        self._metrics: RequestMetrics | None = None  # of the outputs, as long as they do not change
        self._reasons: list[FinishReason] = []  # once it is over
        self._lock = threading.RLock()  # reentrant: a finalizer may call `end` inside another call of its thread
        self._has_output = False

    @property
    def unfinished_ids(self) -> list[str]:
        """The engine's ids of the completions that have not ended."""
        return [one.engine_id for one in self.completions if one.finish_reason is None]

    def update(self, completion: Completion, output: EngineCoreOutput, now: float) -> tuple[int, bool]:
        """Applies an output; returns how many of its tokens belong to the completion, and whether `take` returns an
        output now."""
        with self._lock:
            if self.is_over:
                return 0, False
            if output.first_scheduled_s != completion.first_scheduled_s or (
                output.num_preemptions != completion.num_preemptions
            ):
                self._metrics = None
            num_new = completion.update(output)
            if output.prompt_logprobs is not None:
                self._prompt_positions = prompt_positions(output.prompt_logprobs, self._token_text)
            if output.pooled is not None:
                self._pooled = output.pooled.values
            if num_new and self._first_token_s is None:
                self._first_token_s, self._metrics = now, None
                for observer in self._observers:
                    observer.first_token(self.num_prompt_tokens, self._request.arrival_s, now)
            if output.error is not None:
                self._end(error_of(output.error), now)
            elif completion.finish_reason is not None and not self.unfinished_ids:
                self._end(None, now)
            if self.is_over or self._kind != "final":
                self._has_output = True
            return num_new, self._has_output

    def end(self, now: float) -> None:
        """Ends the unfinished completions as aborted."""
        with self._lock:
            if not self.is_over:
                self._end(None, now)
                self._has_output = True

    def _end(self, error: RingcoreError | None, now: float) -> None:
        self._reasons = self._finish_reasons(error)
        for one in self.completions:
            one.finish_reason = one.finish_reason or "abort"
        self.is_over, self.error, self._finished_s, self._metrics = True, error, now, None

    def _finish_reasons(self, error: RingcoreError | None) -> list[FinishReason]:
        cut_off: FinishReason = "abort" if error is None else "error"
        return [one.finish_reason or cut_off for one in self.completions]

    def summary(self, error: RingcoreError | None) -> EndedRequest:
        """error: by which it ended, where it has none of its own."""
        return EndedRequest(
            is_over=self.is_over,
            times=self.metrics(),
            num_prompt_tokens=self.num_prompt_tokens,
            num_tokens=[one.num_tokens for one in self.completions],
            finish_reasons=self._reasons or self._finish_reasons(error),
            max_tokens=self.params.max_tokens,
        )

    def take(self) -> RequestOutput | None:
        """The output since the last call, or all so far, by the output kind; None if there is nothing new."""
        if not self._has_output:  # a look without the lock: most second looks of a reader end here
            return None
        with self._lock:
            if not self._has_output:
                return None
            self._has_output = False
            if self._metrics is None:
                self._metrics = self.metrics()
            is_delta = self._kind == "delta"
            outputs = [one.take(is_delta, self.is_over) for one in self.completions]
            failed_at_once = self.error is not None and self._first_token_s is None
            return RequestOutput(  # by position: one of the hottest calls of a service
                self.request_id,
                self._prompt,
                self._prompt_token_ids,
                [] if failed_at_once else outputs,
                self.completions[0].num_cached_tokens,
                self._metrics,
                self.error,
                None if self._prompt_positions is None else self._take_prompt_positions(),
                self._pooled,
            )

    def _take_prompt_positions(self) -> PromptPositions | None:
        """The caller owns the returned list."""
        positions = self._prompt_positions
        if self._kind == "delta":
            self._prompt_positions = None
        elif positions is not None and not self.is_over:
            return positions.copy()
        return positions

    def take_last(self) -> RequestOutput:
        """The final output of a request of which nothing was taken."""
        output = self.take()
        assert output is not None, f"request {self.request_id!r} has nothing to take"
        return output

    @property
    def params(self) -> SamplingParams:
        return self._request.sampling_params

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt_token_ids)

    def metrics(self) -> RequestMetrics:
        scheduled = [one.first_scheduled_s for one in self.completions if one.first_scheduled_s is not None]
        return RequestMetrics(
            arrival_s=self._request.arrival_s,
            first_scheduled_s=min(scheduled, default=None),
            first_token_s=self._first_token_s,
            finished_s=self._finished_s,
            num_preemptions=sum(one.num_preemptions for one in self.completions),
        )


class Completion:
    """One completion of a request; to the engine it is a request of its own."""

    def __init__(
        self,
        request: RequestState,
        index: int,
        sent: EngineCoreRequest,
        prompt_token_ids: list[int],
        tokenizer: TextSource,
    ) -> None:
        params = sent.sampling_params
        self.request = request
        self.engine_id = sent.request_id
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.first_scheduled_s: float | None = None
        self.num_preemptions = 0
        self._index = index
        self._token_text = tokenizer.token_text
        text = tokenizer.stream(params.skip_special_tokens, prompt_token_ids) if params.detokenize else NoText()
        self._detokenizer = Detokenizer(text, params)
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._cumulative_logprob = 0.0
        self._stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Generated so far."""
        return self._detokenizer.num_tokens

    def update(self, output: EngineCoreOutput) -> int:
        """Applies an output; returns how many of its tokens belong to the completion."""
        self.num_cached_tokens, self.num_preemptions = output.num_cached_tokens, output.num_preemptions
        self.first_scheduled_s = output.first_scheduled_s
        num_new, stop = self._append_tokens(output)
        if output.finish_reason is not None and stop is None:
            stop = self._detokenizer.finish()
        if stop is not None and output.error is None:
            self.finish_reason, self._stop_reason = "stop", stop
        elif output.finish_reason is not None:
            self.finish_reason, self._stop_reason = output.finish_reason, output.stop_reason
        return num_new

    def _append_tokens(self, output: EngineCoreOutput) -> tuple[int, str | None]:
        """Appends tokens up to the one that completes a stop string, which is returned with their number."""
        token_ids, append = output.new_token_ids, self._detokenizer.append
        stop_token_at = len(token_ids) - 1 if output.finish_reason == "stop" else None
        for i, token_id in enumerate(token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is not None and output.logprobs is not None:
                self._append_logprobs(output.logprobs[i])
            stop = append(token_id, i == stop_token_at)
            if stop is not None:
                return i + 1, stop
        return len(token_ids), None

    def _append_logprobs(self, position: TokenLogprobs) -> None:
        assert self._logprobs is not None
        self._cumulative_logprob += position.logprobs[0]  # the sampled token comes first
        self._logprobs.append(
            {
                token_id: Logprob(logprob, rank, self._token_text(token_id))
                for token_id, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True)
            }
        )

    def take(self, is_delta: bool, is_last: bool) -> CompletionOutput:
        """The output since the last call (delta), or all so far. The caller owns the lists."""
        text = self._detokenizer.take() if is_delta else self._detokenizer.text
        token_ids, logprobs = self._token_ids, self._logprobs
        if is_delta:
            self._token_ids, self._logprobs = [], None if logprobs is None else []
        elif not is_last:
            token_ids, logprobs = token_ids.copy(), None if logprobs is None else logprobs.copy()
        cumulative_logprob = None if logprobs is None else self._cumulative_logprob
        return CompletionOutput(
            self._index, text, token_ids, cumulative_logprob, logprobs, self.finish_reason, self._stop_reason
        )


def error_of(wire: WireError) -> RingcoreError:
    """The error of a message, as an exception."""
    return error_from_wire({"type": wire.type, "message": wire.message, "details": wire.details})


def id_in_use(request_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"request_id={request_id!r} is in use; give each request its own, or none", field="request_id", value=request_id
    )
