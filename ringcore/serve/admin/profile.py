"""Profiles over HTTP: a trace of every engine (`ringcore trace`) from one call to another, as one file for Perfetto."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from ringcore.errors import RingcoreError
from ringcore.front_end.daemon_threads import DaemonThreads
from ringcore.front_end.engine_calls import EngineCalls
from ringcore.front_end.engine_trace import Recording
from ringcore.openai_api.errors import ApiError
from ringcore.serve.admin.replica_answers import AdminCalls
from ringcore.tracing.timeline import joined

__all__ = ["Profiler"]

T = TypeVar("T")


class Profiler:
    """The profile that was begun last, until it is taken. An engine refuses a second trace while one is recorded."""

    def __init__(self, calls: AdminCalls) -> None:
        self._calls = calls
        self._threads = DaemonThreads("ringcore-profile")
        self._recordings: dict[int, Recording] = {}

    async def start(self, seconds: float, operators: bool) -> list[int]:
        """-> the replicas that are recorded. Raises `PartlyFailedError`, and then records none."""
        begun: list[Recording] = []

        async def begin(one: EngineCalls) -> Recording:
            (recording,) = await one.start_trace(seconds, operators)
            begun.append(recording)
            return recording

        try:
            self._recordings = await self._calls.each(begin)
        except ApiError:
            await asyncio.gather(*(self._in_thread(one.stop) for one in begun), return_exceptions=True)
            raise
        return list(self._recordings)

    async def stop(self) -> bytes:
        """The file: JSON. Raises 400 where nothing was begun, and `RingcoreError` if no replica answers."""
        with self._calls.counted():
            recordings, self._recordings = self._recordings, {}
            if not recordings:
                raise ApiError(HTTPStatus.BAD_REQUEST, "no profile was begun; POST /start_profile first")
            return await self._in_thread(lambda: _file(recordings))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._threads.submit(function))


def _file(recordings: Mapping[int, Recording]) -> bytes:
    files: dict[int, dict[str, Any]] = {}
    failed: dict[int, RingcoreError] = {}
    for number, recording in recordings.items():
        try:
            files[number] = recording.stop()
        except RingcoreError as error:  # the engine died meanwhile
            failed[number] = error
    if not files:
        raise next(iter(failed.values()))
    notes = [f"replica {number}: left out; {error.message}" for number, error in failed.items()]
    return msgspec.json.encode(joined(files, notes))
