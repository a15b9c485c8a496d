"""One call of every engine of a service, and what each of them answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from ringcore.errors import RingcoreError
from ringcore.front_end.engine_calls import EngineCalls
from ringcore.front_end.serving_engine import ServingEngine
from ringcore.openai_api.errors import ApiError, api_error_of

__all__ = ["AdminCalls", "PartlyFailedError", "told"]

T = TypeVar("T")

_MAX_IN_FLIGHT = 16  # each may hold a thread until its timeout


class PartlyFailedError(ApiError):
    """The error of the first replica that failed, beside what every replica answered."""

    def __init__(self, number: int, error: ApiError, replicas: list[dict[str, Any]]) -> None:
        message = f"replica {number}: {error.message}" if len(replicas) > 1 else error.message
        super().__init__(error.status, message, error.type, error.param, error.code, error.headers)
        self.replicas = replicas

    def body(self) -> dict[str, Any]:
        return super().body() | {"replicas": self.replicas}


class AdminCalls:
    """Admin calls of one service, a bounded number at once. None of them blocks requests: each waits in threads of its
    own, and an engine answers between or during steps."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine, self._num_in_flight = engine, 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Raises 429 while too many are in flight."""
        if self._num_in_flight >= _MAX_IN_FLIGHT:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"{_MAX_IN_FLIGHT} admin calls are in flight; try again once one has ended",
                "rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1

    async def each(self, call: Callable[[EngineCalls], Awaitable[T]]) -> dict[int, T]:
        """The value of each replica that is not lost, by its number. Raises `PartlyFailedError` once all have
        answered."""
        with self.counted():
            replicas = self._engine.live_replicas()
            answers = await asyncio.gather(*map(call, replicas.values()), return_exceptions=True)
        values: dict[int, T] = {}
        errors: dict[int, ApiError] = {}
        for number, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, RingcoreError | ApiError):
                errors[number] = api_error_of(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                values[number] = answer
        if errors:
            entries = [
                {"replica": number, "error": errors[number].body()["error"]}
                if number in errors
                else {"replica": number}
                for number in replicas
            ]
            raise PartlyFailedError(*next(iter(errors.items())), entries)
        return values


def told(values: Mapping[int, T], describe: Callable[[T], dict[str, Any]] = lambda _: {}) -> list[dict[str, Any]]:
    """The entries of an answer's "replicas"."""
    return [{"replica": number} | describe(value) for number, value in values.items()]
