"""Metrics over HTTP: a port of this process for Prometheus.

Not prometheus_client's own server: to a Prometheus that asks for OpenMetrics it writes `vllm_` for `vllm:`.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from prometheus_client import CollectorRegistry, generate_latest

from ringcore.errors import ConfigError

__all__ = ["CONTENT_TYPE", "MetricsServer", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def render(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus's text format, of `CONTENT_TYPE`. It asks the engine, and may take seconds."""
    return generate_latest(registry)


class MetricsServer:
    """Serves a registry until `close`, in threads that do not keep the process. port: 0 picks one.

    Raises `ConfigError` for a port that is in use.
    """

    def __init__(self, registry: CollectorRegistry, port: int, host: str) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                text = render(registry)
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                """No log."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise ConfigError(
                f"port={port}: cannot listen at {host}: {error.strerror}; give another", option="port", value=port
            ) from error
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://{host}:{self.port}/metrics"
        self._thread = threading.Thread(target=self._server.serve_forever, name="ringcore-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
