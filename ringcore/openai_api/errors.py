"""Errors in the form of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from ringcore.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RingcoreError,
    RpcTimeoutError,
    SleepingError,
    UnknownOptionError,
    WorkerDiedError,
)

__all__ = [
    "ApiError",
    "api_error_of",
    "engine_restarting",
    "fields_named",
    "invalid_body",
    "over_limit",
    "request_aborted",
]

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_MAX_ALTERNATIVES = 4


@dataclass(slots=True, eq=False)
class ApiError(Exception):
    """An error response."""

    status: int
    message: str
    type: str = _INVALID
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] | None = None  # of Anthropic's form alone

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def over_limit(num_in_flight: int, limit: int) -> ApiError:
    return _too_many(
        f"{num_in_flight} completions are in flight and the service allows {limit} at once; try again in a second"
    )


def _too_many(message: str) -> ApiError:
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        message,
        "rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": "1"},
    )


def engine_restarting() -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "the engine died and is restarting; try again in some seconds",
        _SERVER,
        code="engine_starting",
        headers={"Retry-After": "5"},
    )


def request_aborted() -> ApiError:
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE, "the request was aborted before its answer ended; send it again", _SERVER
    )


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """What is raised within names a field as the client's API calls it. names: by our name."""
    try:
        yield
    except InvalidRequestError as error:
        field_ = str(error.details.get("field"))
        name = re.split(r"[.\[]", field_, maxsplit=1)[0]
        if name not in names:
            raise
        told = names[name] + error.message.removeprefix(name) if error.message.startswith(name) else error.message
        named = error.details | {"field": names[name] + field_.removeprefix(name)}
        raise InvalidRequestError(told, **named) from error


def api_error_of(error: Exception) -> ApiError:
    """The response for any error. The text of a foreign exception is not sent: it may contain secrets."""
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            field_, code = error.details.get("field"), error.details.get("code")
            return ApiError(HTTPStatus.BAD_REQUEST, error.message, param=field_, code=code)
        case UnknownOptionError():
            return ApiError(HTTPStatus.BAD_REQUEST, error.message, param=error.details.get("option"))
        case SleepingError():
            return _unavailable(error, "engine_sleeping")
        case WorkerDiedError():  # the engine starts new workers
            return _unavailable(error, "engine_recovering", {"Retry-After": "1"})
        case QueueFullError():
            return _too_many(error.message)
        case EngineDeadError():
            return _unavailable(error, "engine_dead")
        case RpcTimeoutError():
            return ApiError(HTTPStatus.GATEWAY_TIMEOUT, _first_line(error), _SERVER, code="timeout")
        case RingcoreError():
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, _first_line(error), _SERVER, code="engine_error")
        case _:
            message = "the service failed at this request; see its log"
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, _SERVER, code="internal_error")


def _unavailable(error: RingcoreError, code: str, headers: dict[str, str] | None = None) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, _first_line(error), _SERVER, code=code, headers=headers or {})


def _first_line(error: RingcoreError) -> str:
    """Further lines are the log of a dead process."""
    return error.message.partition("\n")[0]


def invalid_body(findings: Sequence[Mapping[str, Any]]) -> ApiError:
    """The error of a body that is not of its schema. findings: pydantic's, whose paths begin at the body; several for
    one field are the alternatives of a union."""
    field_ = _field(findings[0])
    if field_ is None:
        return ApiError(HTTPStatus.BAD_REQUEST, f"the body: {findings[0]['msg']}; send a JSON object")
    messages = [one["msg"] for one in findings if _field(one) == field_]
    texts = " or: ".join(list(dict.fromkeys(messages))[:_MAX_ALTERNATIVES])
    return ApiError(HTTPStatus.BAD_REQUEST, f"{field_}: {texts}", param=field_)


def _field(finding: Mapping[str, Any]) -> str | None:
    """The name of the body's field, with the path within it if it is a list; None for the body itself.

    For other fields the path has pydantic's own names of union alternatives, which are dropped.
    """
    where = finding["loc"]
    if finding["type"] == "json_invalid" or not where:
        return None
    if len(where) < 2 or not isinstance(where[1], int):
        return str(where[0])
    return str(where[0]) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in where[1:])
