"""Error responses, in the form of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ringcore.errors import RingcoreError
from ringcore.openai_api.errors import ApiError, api_error_of, invalid_body

__all__ = ["add_error_handlers", "error_response", "json_response"]

_INVALID = "invalid_request_error"
_SERVER = "server_error"


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _answer)
    app.add_exception_handler(RingcoreError, _answer)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.add_exception_handler(Exception, _answer)  # Starlette then raises it again, and the server logs it


async def _answer(request: Request, error: Exception) -> Response:
    return error_response(api_error_of(error))


async def _answer_http(request: Request, error: Exception) -> Response:
    """Errors of the router: unknown path, wrong method, a body that is not JSON."""
    assert isinstance(error, HTTPException)
    type_ = _INVALID if error.status_code < HTTPStatus.INTERNAL_SERVER_ERROR else _SERVER
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message, type_, headers=dict(error.headers or {})))


async def _answer_invalid(request: Request, error: Exception) -> Response:
    """FastAPI's paths begin with the part of the request, which is the body."""
    assert isinstance(error, RequestValidationError)
    return error_response(invalid_body([{**finding, "loc": finding["loc"][1:]} for finding in error.errors()]))
