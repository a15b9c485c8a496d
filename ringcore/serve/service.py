"""Shared state of the endpoints: the engine and its model, the limits, the metrics."""

from __future__ import annotations

from ringcore.front_end.serving_engine import ServingEngine
from ringcore.host.file_names import as_utf8
from ringcore.openai_api.errors import engine_restarting
from ringcore.openai_api.served_model import ServedModel, unix_seconds
from ringcore.serve.limits import ConcurrencyLimit
from ringcore.serve.options import ServiceOptions

__all__ = ["Service"]


class Service:
    """An engine with the options and limits of its clients.

    is_ending: it was asked to end, and requests should go elsewhere.
    """

    def __init__(self, engine: ServingEngine, options: ServiceOptions) -> None:
        self.engine = engine
        self.options = options
        self.model_names = options.served_model_names or (as_utf8(engine.config.model.model),)
        self.concurrency = ConcurrencyLimit(options)
        self.metrics = engine.metrics(self.model_names[0])
        self.model = ServedModel(
            engine,
            names=self.model_names,
            max_n=options.max_n,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
            is_strict=options.strict,
            takes_chat_templates=options.trust_request_chat_template,
        )
        self.started_at = unix_seconds()
        self.is_ending = False

    def check_started(self) -> None:
        """Raises 503 while the engine restarts, since that may take long."""
        if self.engine.is_starting:
            raise engine_restarting()

    def begin_ending(self) -> None:
        self.is_ending = True
