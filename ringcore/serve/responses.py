"""POST /v1/responses, and GET and DELETE of a stored one."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.responses import Response

from ringcore.errors import InvalidRequestError
from ringcore.openai_api.responses.answers import DeletedResponse, ResponseObject
from ringcore.openai_api.responses.responses import Responses
from ringcore.openai_api.responses.schema import ResponsesRequest
from ringcore.openai_api.responses.store import ResponseStore
from ringcore.serve.errors import described, json_response
from ringcore.serve.generation import generate
from ringcore.serve.service import Service
from ringcore.serve.streaming import EventForm

__all__ = ["add_responses"]


def add_responses(app: FastAPI, service: Service) -> None:
    options = service.options
    store = app.state.responses = ResponseStore(options.max_stored_responses, options.max_stored_response_bytes)

    @app.post("/v1/responses", responses=described(ResponseObject, "text/event-stream"))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        service.check_started()
        asked = Responses(service.model, body, store)
        form = EventForm(error=asked.failed, is_named=True, end=b"")
        return await generate(service, asked, body.stream, request.receive, form)

    @app.get("/v1/responses/{response_id}", responses=described(ResponseObject))
    async def response(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise InvalidRequestError("stream: a stored response is not streamed; leave it out", field="stream")
        return json_response(store.get(response_id).response)

    @app.delete("/v1/responses/{response_id}", responses=described(DeletedResponse))
    async def delete(response_id: str) -> Response:
        store.delete(response_id)
        return json_response(DeletedResponse(id=response_id, object="response", deleted=True))
