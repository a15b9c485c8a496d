"""OpenTelemetry in a service: the parent of a request's spans, from its headers, and the exporter of the command."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ringcore.errors import ConfigError
from ringcore.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["TraceContext", "otlp_provider", "spans_to"]

_HEADERS = (b"traceparent", b"tracestate")
_EXPORT_S = 10.0  # of one request to the endpoint
_SHUTDOWN_S = 3.0
_MAX_QUEUED_SPANS = 16384  # beyond, spans are dropped


class TraceContext:
    """ASGI middleware: the caller's span, by the W3C headers, is the parent of the request's spans. Unless the
    application is instrumented already, and has a span of its own."""

    def __init__(self, app: ASGIApp) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app, self._context, self._trace = app, context, trace
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = [(name, value) for name, value in scope.get("headers", ()) if name in _HEADERS]
        if not found or self._trace.get_current_span().get_span_context().is_valid:
            await self._app(scope, receive, send)
            return
        headers = {name.decode(): value.decode("latin-1") for name, value in found}
        token = self._context.attach(self._propagator.extract(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            self._context.detach(token)


def otlp_provider(endpoint: str) -> TracerProvider:
    """Sends spans to an OTLP/HTTP endpoint, in batches, by a thread of its own with a bounded queue: an endpoint that
    is down or hangs loses spans, and slows nothing. Raises `ConfigError`."""
    if find_spec("opentelemetry.exporter") is None or find_spec("opentelemetry.sdk") is None:
        raise ConfigError(
            "otlp_traces_endpoint needs opentelemetry: pip install 'ringcore[otel]'", option="otlp_traces_endpoint"
        )
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r}: give the URL of an OTLP/HTTP endpoint, as "
            "http://localhost:4318/v1/traces",
            option="otlp_traces_endpoint",
            value=repr(endpoint),
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "ringcore", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # its own wait has no bound
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_S)
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED_SPANS, schedule_delay_millis=1000)
    )
    return provider


@contextmanager
def spans_to(endpoint: str | None) -> Iterator[TracerProvider | None]:
    """The provider for an endpoint; at the end it sends what is queued, for at most 3 s. None for None."""
    if endpoint is None:
        yield None
        return
    provider = otlp_provider(endpoint)
    try:
        yield provider
    finally:
        thread = threading.Thread(target=provider.shutdown, name="ringcore-otlp-shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)
