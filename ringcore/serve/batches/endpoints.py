"""/v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StrictStr

from ringcore.batch.openai_lines import ENDPOINTS
from ringcore.openai_api.errors import ApiError
from ringcore.serve.batches.queue import BatchQueue
from ringcore.serve.batches.store import BatchStore
from ringcore.serve.batches.upload import receive_upload
from ringcore.serve.errors import json_response
from ringcore.serve.service import Service

__all__ = ["add_batches"]


class BatchRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    input_file_id: StrictStr
    endpoint: StrictStr
    completion_window: StrictStr = "24h"
    metadata: Annotated[dict[str, str] | None, Field(max_length=16)] = None


def add_batches(app: FastAPI, service: Service, folder: str) -> BatchQueue:
    store = BatchStore(folder, service.options.max_batch_dir_bytes)
    queue = BatchQueue(service, store)
    _add_files(app, service, store, queue)
    _add_batches(app, store, queue)
    return queue


def _add_files(app: FastAPI, service: Service, store: BatchStore, queue: BatchQueue) -> None:
    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        return json_response(await receive_upload(request, store, service.options.max_batch_file_bytes))

    @app.get("/v1/files")
    async def files(after: str | None = None, limit: int = 10_000, purpose: str | None = None) -> Response:
        found, has_more = await asyncio.to_thread(store.files, after, limit)
        return json_response(_listing([one for one in found if purpose in (None, one.purpose)], has_more))

    @app.get("/v1/files/{file_id}")
    async def file(file_id: str) -> Response:
        return json_response(store.file(file_id))

    @app.get("/v1/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        return FileResponse(store.content(file_id), media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete(file_id: str) -> Response:
        if file_id in {batch.input_file_id for batch in store.unfinished()}:
            raise ApiError(HTTPStatus.CONFLICT, f"{file_id}: a batch that is not finished reads it; cancel that first")
        store.delete_file(file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})


def _add_batches(app: FastAPI, store: BatchStore, queue: BatchQueue) -> None:
    @app.post("/v1/batches")
    async def create(body: BatchRequest) -> Response:
        if body.endpoint not in ENDPOINTS:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"endpoint: give {' or '.join(ENDPOINTS)}", param="endpoint")
        if store.file(body.input_file_id).purpose != "batch":
            raise ApiError(
                HTTPStatus.BAD_REQUEST, "input_file_id: give a file of the purpose 'batch'", param="input_file_id"
            )
        batch = store.new_batch(body.input_file_id, body.endpoint, body.completion_window, body.metadata)
        queue.start()
        return json_response(batch)

    @app.get("/v1/batches")
    async def batches(after: str | None = None, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> Response:
        found, has_more = await asyncio.to_thread(store.batches, after, limit)
        return json_response(_listing([queue.batch(one.id) for one in found], has_more))

    @app.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str) -> Response:
        return json_response(queue.batch(batch_id))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str) -> Response:
        return json_response(queue.cancel(batch_id))


def _listing(found: list[Any], has_more: bool) -> dict[str, Any]:
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    return {"object": "list", "data": found, "first_id": first, "last_id": last, "has_more": has_more}
