"""Errors in the form of Anthropic's API: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from ringcore.openai_api.errors import ApiError

__all__ = ["error_body"]

_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


def error_body(error: ApiError) -> dict[str, Any]:
    """The message names the request's field, for which this form has no place of its own."""
    other = "invalid_request_error" if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else "api_error"
    body = {"type": _TYPES.get(error.status, other), "message": error.message}
    return {"type": "error", "error": body if error.details is None else body | {"details": error.details}}
