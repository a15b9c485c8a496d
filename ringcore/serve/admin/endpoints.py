"""The admin endpoints. Their paths are `access.ADMIN_PATHS`, which an admin key alone opens.

Each call is made to every replica, and the answer's "replicas" has what each one said. An error of one is the answer's
error; "replicas" then says which others have done it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import Body, FastAPI, Query
from fastapi.responses import Response

from ringcore.front_end.engine_calls import EngineCalls
from ringcore.protocol.messages import MemoryReport
from ringcore.serve.admin import schema
from ringcore.serve.admin.json_values import json_of_values
from ringcore.serve.admin.pauses import abort_requests, pause_all
from ringcore.serve.admin.profile import Profiler
from ringcore.serve.admin.replica_answers import AdminCalls, told
from ringcore.serve.admin.server_info import server_info
from ringcore.serve.errors import described, json_response
from ringcore.serve.service import Service

__all__ = ["add_admin"]

_ANSWER_S = 10.0  # of what an engine says at once


def add_admin(app: FastAPI, service: Service) -> None:
    calls = AdminCalls(service.engine)
    _add_sleep(app, calls)
    _add_pauses(app, service, calls)
    _add_weights(app, calls)
    _add_rpc(app, service, calls)
    _add_profiles(app, Profiler(calls))
    _add_info(app, service)


async def _operated(calls: AdminCalls, call: Callable[[EngineCalls], Awaitable[MemoryReport]]) -> Response:
    """A sleep, wake-up or update: the `MemoryReport` of each replica."""
    return json_response({"replicas": told(await calls.each(call), msgspec.structs.asdict)})


def _add_sleep(app: FastAPI, calls: AdminCalls) -> None:
    @app.post("/sleep", responses=described(schema.ReplicasAnswer))
    async def sleep(query: Annotated[schema.SleepQuery, Query()]) -> Response:
        return await _operated(calls, lambda one: one.sleep(query.level, query.mode, query.timeout))

    @app.post("/wake_up", responses=described(schema.ReplicasAnswer))
    async def wake_up(query: Annotated[schema.WakeUpQuery, Query()]) -> Response:
        return await _operated(calls, lambda one: one.wake_up(query.tags or None, query.timeout))

    @app.get("/is_sleeping", responses=described(schema.SleepingAnswer))
    async def is_sleeping(query: Annotated[schema.NoQuery, Query()]) -> Response:
        values = await calls.each(lambda one: one.is_sleeping(_ANSWER_S))
        entries = told(values, lambda value: {"is_sleeping": value})
        return json_response({"is_sleeping": all(values.values()), "replicas": entries})


def _add_pauses(app: FastAPI, service: Service, calls: AdminCalls) -> None:
    @app.post("/pause", responses=described(schema.StatusAnswer))
    async def pause(query: Annotated[schema.PauseQuery, Query()]) -> Response:
        values = await pause_all(service.engine, calls, query.mode, query.clear_cache, query.timeout)
        entries = told(values, lambda value: {"has_cleared_cache": value})
        return json_response({"status": "paused", "replicas": entries})

    @app.post("/resume", responses=described(schema.StatusAnswer))
    async def resume(query: Annotated[schema.NoQuery, Query()]) -> Response:
        return json_response(
            {"status": "resumed", "replicas": told(await calls.each(lambda one: one.resume(_ANSWER_S)))}
        )

    @app.get("/is_paused", responses=described(schema.SleepingAnswer))
    async def is_paused(query: Annotated[schema.NoQuery, Query()]) -> Response:
        healths = await calls.each(lambda one: one.health(_ANSWER_S))
        entries = told(healths, lambda one: {"is_paused": one.paused is not None, "state": one.state})
        return json_response({"is_paused": all(one["is_paused"] for one in entries), "replicas": entries})

    @app.post("/abort_requests", responses=described(schema.AbortAnswer))
    async def abort(body: Annotated[schema.AbortBody | None, Body()] = None) -> Response:
        ended = await abort_requests(service.engine, None if body is None else body.request_ids)
        return json_response({"status": "aborted", "aborted": len(ended), "request_ids": ended})

    @app.post("/reset_prefix_cache", responses=described(schema.ReplicasAnswer))
    async def reset_prefix_cache(query: Annotated[schema.ResetQuery, Query()]) -> Response:
        values = await calls.each(lambda one: one.reset_prefix_cache(query.reset_running_requests, query.timeout))
        return json_response({"replicas": told(values, lambda value: {"has_reset": value})})


def _add_weights(app: FastAPI, calls: AdminCalls) -> None:
    @app.post("/reload_weights", responses=described(schema.ReplicasAnswer))
    async def reload_weights(body: schema.ReloadBody) -> Response:
        return await _operated(calls, lambda one: one.reload_weights(body.path, body.mode, body.timeout))

    @app.post("/start_weight_update", responses=described(schema.ReplicasAnswer))
    async def start_weight_update(query: Annotated[schema.TimedQuery, Query()]) -> Response:
        return await _operated(calls, lambda one: one.start_weight_update(timeout=query.timeout))

    @app.post("/update_weights", responses=described(schema.ReplicasAnswer))
    async def update_weights(body: schema.UpdateBody) -> Response:
        return await _operated(calls, lambda one: one.update_weights(body.path, body.timeout))

    @app.post("/finish_weight_update", responses=described(schema.ReplicasAnswer))
    async def finish_weight_update(query: Annotated[schema.TimedQuery, Query()]) -> Response:
        return await _operated(calls, lambda one: one.finish_weight_update(query.timeout))


def _add_rpc(app: FastAPI, service: Service, calls: AdminCalls) -> None:
    @app.post("/collective_rpc", responses=described(schema.RpcAnswer))
    async def collective_rpc(body: schema.RpcBody) -> Response:
        options: dict[str, Any] = {"timeout": body.timeout, "unique_reply_rank": body.unique_reply_rank}
        values = await calls.each(lambda one: one.collective_rpc(body.method, body.args, body.kwargs, **options))
        of_each = {n: value if body.unique_reply_rank is None else [value] for n, value in values.items()}
        answer = {
            "results": [value for of_replica in of_each.values() for value in of_replica],
            "replicas": told(of_each, lambda of_replica: {"num_results": len(of_replica)}),
        }
        encoded = await asyncio.to_thread(json_of_values, answer)
        return Response(encoded, media_type="application/json")

    @app.get("/get_world_size", responses=described(schema.WorldSizeAnswer))
    async def get_world_size(query: Annotated[schema.WorldSizeQuery, Query()]) -> Response:
        num_ranks = service.engine.config.parallel.layout.world_size
        num_replicas = len(service.engine.live_replicas()) if query.include_dp else 1
        return json_response({"world_size": num_ranks * num_replicas})


def _add_profiles(app: FastAPI, profiler: Profiler) -> None:
    @app.post("/start_profile", responses=described(schema.ReplicasAnswer))
    async def start_profile(query: Annotated[schema.ProfileQuery, Query()]) -> Response:
        numbers = await profiler.start(query.seconds, query.operators)
        return json_response({"replicas": [{"replica": number} for number in numbers]})

    @app.post("/stop_profile", responses=described(dict[str, Any]))
    async def stop_profile(query: Annotated[schema.NoQuery, Query()]) -> Response:
        headers = {"Content-Disposition": 'attachment; filename="trace.json"'}
        return Response(await profiler.stop(), 200, headers, media_type="application/json")


def _add_info(app: FastAPI, service: Service) -> None:
    @app.get("/server_info", responses=described(schema.ServerInfo))
    async def info(query: Annotated[schema.NoQuery, Query()]) -> Response:
        return json_response(await server_info(service, _ANSWER_S))
