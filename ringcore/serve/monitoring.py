"""What a supervisor asks: /health and the probes of an orchestrator, /version, /metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from ringcore.front_end.engine_health import merged_health
from ringcore.metrics.server import CONTENT_TYPE, render
from ringcore.openai_api.answers import HealthResponse, ProbeResponse, VersionResponse
from ringcore.protocol.messages import EngineHealth
from ringcore.serve.errors import json_response
from ringcore.serve.service import Service
from ringcore.version import __version__

__all__ = ["add_monitoring"]

_SERVING = ("ready", "sleeping")  # an engine sleeps only on its operator's call
_PROBE_S = 3.0  # for an engine's answer: one that is slow on a busy host serves


def add_monitoring(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=_described(HealthResponse))
    async def health() -> Response:
        """200 for an engine that is ready or sleeps; else 503. The cause of its death is in the answers to requests."""
        replicas = await _replicas(service)
        health = merged_health(replicas)
        body = {name: getattr(health, name) for name in ("state", "num_running", "num_waiting", "num_restarts")}
        body["replicas"] = [one.state for one in replicas]
        return json_response(body, 200 if health.state in _SERVING else 503)

    @app.get("/health/live", responses=_described(ProbeResponse))
    async def live() -> Response:
        """503 once only a new process can help: every engine has died, and none is being replaced."""
        is_dead = (await service.engine.health(_PROBE_S)).state == "dead"
        return _probed("every engine has died" if is_dead else None)

    @app.get("/health/ready", responses=_described(ProbeResponse))
    async def ready() -> Response:
        """200 while a request would be computed now: an engine is ready and not paused, and the service goes on."""
        if service.is_ending:
            return _probed("the service ends")
        engines = await _replicas(service, _PROBE_S)
        return _probed(None if any(map(_is_serving, engines)) else _why_not(engines))

    @app.get("/version", responses={200: {"model": VersionResponse}})
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await asyncio.to_thread(render, service.metrics), media_type=CONTENT_TYPE)


async def _replicas(service: Service, timeout: float = 1.0) -> list[EngineHealth]:
    """Asked once more where none of several serves: their answers are of different times, so that one may be of an
    engine before it was ready, and the other of one that was replaced after that one was."""
    engines = await service.engine.replica_healths(timeout)
    if len(engines) > 1 and not any(map(_is_serving, engines)):
        engines = await service.engine.replica_healths(timeout)
    return engines


def _is_serving(engine: EngineHealth) -> bool:
    return engine.state == "ready" and engine.paused is None


def _why_not(engines: list[EngineHealth]) -> str:
    states = ["paused" if one.state == "ready" else one.state for one in engines]
    return f"no engine serves: {', '.join(states)}"


def _probed(failure: str | None) -> Response:
    return json_response({"is_ok": failure is None, "reason": failure}, 200 if failure is None else 503)


def _described(answer: Any) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": answer} for status in (200, 503)}
