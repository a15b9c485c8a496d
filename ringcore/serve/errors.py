"""JSON responses; errors have the form of the API that a path belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ringcore.anthropic_api.errors import error_body
from ringcore.errors import RingcoreError
from ringcore.openai_api.errors import ApiError, api_error_of, invalid_body

__all__ = ["Described", "add_error_handlers", "described", "error_response", "json_response"]

Described = dict[int | str, dict[str, Any]]  # responses of an endpoint, by status

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_ANTHROPIC = "/v1/messages/"  # paths below it


def described(answer: Any, *media_types: str) -> Described:
    """For the OpenAPI document only: responses are not validated against it."""
    return {200: {"model": answer, "content": {media_type: {} for media_type in media_types}}}


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """path: of the request."""
    is_anthropic = f"{path}/".startswith(_ANTHROPIC)
    return json_response(error_body(error) if is_anthropic else error.body(), error.status, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(RingcoreError, _answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer)  # Starlette then raises it again, and the server logs it


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(api_error_of(error), request.url.path)


async def _answer_http(request: Request, error: Exception) -> Response:
    """Errors of the router: unknown path, wrong method, a body that is not JSON."""
    assert isinstance(error, HTTPException)
    type_ = _INVALID if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else _SERVER
    message = f"{request.method} {request.url.path}: {error.detail}"
    told = ApiError(error.status_code, message, type_, headers=dict(error.headers or {}))
    return error_response(told, request.url.path)


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """FastAPI's paths begin with the part of the request, which is the body."""
    assert isinstance(error, RequestValidationError)
    told = invalid_body([{**finding, "loc": finding["loc"][1:]} for finding in error.errors()])
    return error_response(told, request.url.path)
