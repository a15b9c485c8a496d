"""POST /v1/responses and /v1/responses/input_tokens; GET and DELETE of a stored response, and its input items."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import Response

from ringcore.errors import InvalidRequestError
from ringcore.openai_api.responses.answers import DeletedResponse, InputItemList, InputTokens, ResponseObject
from ringcore.openai_api.responses.conversation import count_input_tokens
from ringcore.openai_api.responses.input_items import list_items
from ringcore.openai_api.responses.responses import Responses
from ringcore.openai_api.responses.schema import InputTokensRequest, ResponsesRequest
from ringcore.openai_api.responses.store import ResponseStore
from ringcore.serve.errors import described, json_response
from ringcore.serve.generation import generate
from ringcore.serve.service import Service
from ringcore.serve.streaming import EventForm, while_connected

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

    @app.post("/v1/responses/input_tokens", responses=described(InputTokens))
    async def input_tokens(body: InputTokensRequest, request: Request) -> Response:
        return json_response(await while_connected(request.receive, count_input_tokens(service.model, body, store)))

    @app.get("/v1/responses/{response_id}/input_items", responses=described(InputItemList))
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        return json_response(list_items(store.get(response_id).input_items, after, limit, order))

    @app.delete("/v1/responses/{response_id}", responses=described(DeletedResponse))
    async def delete(response_id: str) -> Response:
        store.delete(response_id)
        return json_response(DeletedResponse(id=response_id, object="response", deleted=True))
