"""What every front end of an engine has: prompts become requests, and what the engine puts out becomes texts."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.config import EngineConfig
from ringcore.errors import RingcoreError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.input_processor import InputProcessor, PreparedRequest
from ringcore.front_end.output_processor import OutputProcessor, ProcessedOutputs
from ringcore.front_end.request_state import RequestState
from ringcore.front_end.start_checks import check_start
from ringcore.params.sampling_params import OutputKind

__all__ = ["FrontEnd", "start_engine"]


def start_engine(config: EngineConfig) -> EngineCoreClient:
    """Begins to start the engine of a front end. Raises what `check_start` does."""
    check_start(config)
    return EngineCoreClient(config)


class FrontEnd:
    """An engine that is ready, and the text handling of one that embeds it.

    Made while the engine process starts: loads the tokenizer meanwhile, then waits. Where that fails it ends the
    engine, whose later calls raise the same error.
    """

    def __init__(self, config: EngineConfig, client: EngineCoreClient) -> None:
        self._client = client
        try:
            self.tokenizer = load_tokenizer(config.model.files)
            self.ready = client.wait_ready()
            self.inputs = InputProcessor(config, self.tokenizer, self.ready.max_model_len)
            self.outputs = OutputProcessor(self.tokenizer)
        except BaseException as error:
            client.close(error if isinstance(error, RingcoreError) else None)
            raise

    def add(self, prepared: Sequence[PreparedRequest], kind: OutputKind | None = None) -> list[RequestState]:
        """Sends requests. kind: of their outputs; None: what each asks for."""
        states = [self.outputs.add(one, kind or one.requests[0].sampling_params.output_kind) for one in prepared]
        self._client.add_requests([request for one in prepared for request in one.requests])
        return states

    def receive(self) -> ProcessedOutputs:
        """Waits for the engine's next message and takes it in. The caller aborts `abort_ids`."""
        return self.outputs.process(self._client.get_outputs().outputs)

    def receive_and_abort(self) -> ProcessedOutputs:
        """`receive`, for a caller that sends nothing meanwhile."""
        processed = self.receive()
        if processed.abort_ids:
            self._client.abort(processed.abort_ids)
        return processed

    def drop_unfinished(self) -> None:
        """Ends every request that is under way, and forgets it."""
        unfinished = self.outputs.unfinished_ids
        self.outputs.forget(unfinished)
        if not unfinished:
            return
        try:
            self._client.abort(unfinished)
        except RingcoreError:
            return  # the engine is dead, and its requests with it
