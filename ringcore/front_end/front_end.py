"""Common part of `LLM` and `AsyncEngine`: turns prompts into requests and the engine's outputs into text."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.checkpoint.tokenizer import check_tokenizer_files, load_tokenizer
from ringcore.config import EngineConfig
from ringcore.errors import RingcoreError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.client_start import start_client
from ringcore.front_end.input_processor import InputProcessor, PreparedRequest
from ringcore.front_end.observers import FrontEndObserver
from ringcore.front_end.output_processor import OutputProcessor, ProcessedOutputs
from ringcore.front_end.request_state import RequestState
from ringcore.params.sampling_params import OutputKind
from ringcore.tracing import Tracer, now_ns
from ringcore.tracing.kinds import PROCESSED

__all__ = ["FrontEnd", "start_engine"]


def start_engine(config: EngineConfig, tracer: Tracer, observers: Sequence[FrontEndObserver] = ()) -> EngineCoreClient:
    """`start_client`, after a check of the tokenizer's files: `ModelLoadError`."""
    check_tokenizer_files(config.model.files)
    return start_client(config, tracer, observers)


class FrontEnd:
    """A ready engine with its tokenizer, input processor and output processor.

    The constructor loads the tokenizer while the engine process starts, then waits for the engine. If it fails it ends
    the engine, whose later calls raise the same error.
    """

    def __init__(self, config: EngineConfig, client: EngineCoreClient) -> None:
        self._client = client
        try:
            self.tokenizer = load_tokenizer(config.model.files)
            self.ready = client.wait_ready()
            self.inputs = InputProcessor(config, self.tokenizer, self.ready.max_model_len)
            self.outputs = OutputProcessor(self.tokenizer, client.observers)
        except BaseException as error:
            client.close(error if isinstance(error, RingcoreError) else None)
            raise

    def add(self, prepared: Sequence[PreparedRequest], kind: OutputKind | None = None) -> list[RequestState]:
        """Sends requests. kind: of their outputs; None: the `output_kind` of each."""
        states = [self.outputs.add(one, kind or one.requests[0].sampling_params.output_kind) for one in prepared]
        for observer in self._client.observers:
            for state in states:
                observer.began(state)
        self._client.add_requests([request for one in prepared for request in one.requests])
        return states

    def receive(self) -> ProcessedOutputs:
        """Waits for the engine's next outputs and applies them. The caller must abort `abort_ids`."""
        received, tracer = self._client.get_outputs(), self._client.tracer
        began = tracer.is_on and now_ns()
        processed = self.outputs.process(received.outputs)
        if began:
            step, num_outputs, num_tokens = received.stats.step, len(received.outputs), processed.num_new_tokens
            tracer.record((PROCESSED.number, began, now_ns(), step, num_outputs, num_tokens))
        return processed

    def receive_and_abort(self) -> ProcessedOutputs:
        """`receive`, and sends the aborts; blocks while they are sent."""
        processed = self.receive()
        if processed.abort_ids:
            self._client.abort(processed.abort_ids)
        self._note_ends([state for state in processed.changed if state.is_over])
        return processed

    def drop_unfinished(self) -> None:
        """Aborts every unfinished request and forgets it."""
        unfinished = self.outputs.unfinished_ids
        self._note_ends(self.outputs.unfinished)
        self.outputs.forget(unfinished)
        if not unfinished:
            return
        try:
            self._client.abort(unfinished)
        except RingcoreError:
            return  # the engine is dead, and so are its requests

    def _note_ends(self, states: Sequence[RequestState]) -> None:
        for observer in self._client.observers:
            for state in states:
                observer.ended(state, None)
