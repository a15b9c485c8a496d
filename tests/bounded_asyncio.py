"""Coroutines of tests, which end by a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

WAIT_S = 90.0  # of what takes seconds at most, on a machine that may be busy with anything

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(WAIT_S):
            return await coroutine

    return asyncio.run(bounded())


async def eventually(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.005)
