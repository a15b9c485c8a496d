"""Per-request errors: they end one request, and the other requests of the batch continue."""

from __future__ import annotations

from ringcore.errors import (
    EngineDeadError,
    InvalidRequestError,
    RingcoreError,
    WorkerDiedError,
    WorkerError,
    error_to_wire,
)
from ringcore.protocol.requests import EngineCoreOutput, WireError
from ringcore.scheduler.request import Request

__all__ = ["failure", "id_in_use", "poison_request", "row_error"]


def failure(request: Request, error: RingcoreError) -> EngineCoreOutput:
    """The last output of a request that ends with `error`."""
    return request.to_output([], finish_reason="error", error=WireError(**error_to_wire(error)))


def id_in_use(request_id: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"request_id={request_id!r}: a request with this id is not finished yet; give another id",
        field="request_id",
        value=request_id,
    )


def row_error(request: Request, message: str) -> WorkerError:
    """The worker cannot continue the request's row. `message` comes from the worker."""
    return WorkerError(
        f"request {request.request_id!r} failed in the worker: {message}",
        rank=0,
        error_type="RowError",
        error_message=message,
        traceback="",
        method="execute_model",
    )


def poison_request(request: Request, cause: EngineDeadError) -> WorkerDiedError:
    """A poison request: the workers died in a step with it, and again, of `cause`, in a step with it alone.

    Details: the details of the cause, `request_id`, `num_deaths`.
    """
    details = cause.details | {"request_id": request.request_id, "num_deaths": 2}
    return WorkerDiedError(
        f"request {request.request_id!r} is refused, since the workers died twice while they computed it, the second "
        f"time with nothing else to compute: {cause.message}",
        **details,
    )
