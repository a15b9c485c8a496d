"""Lines that several takers share: each is answered once, whichever takers are lost."""

from __future__ import annotations

import asyncio

import pytest

from ringcore.batch.lines import InputLine
from ringcore.batch.on_ray.shared_lines import SharedLines


def job_of(num_lines: int):
    """The queue of a job, as a `Take`."""
    left = [InputLine(number, b"") for number in range(1, num_lines + 1)]

    async def take():
        await asyncio.sleep(0)
        return left.pop(0) if left else None

    return take


def shared(take) -> SharedLines:
    lines = SharedLines()
    lines.open(take)
    return lines


@pytest.mark.parametrize("num_lines", [0, 1, 30])
def test_a_lost_takers_lines_are_anothers(num_lines):
    async def scenario():
        lines, answered, losses = shared(job_of(num_lines)), [], []

        async def taker(is_lost_after):
            while (attempt := await lines.take()) is not None:
                await asyncio.sleep(0)
                if not is_lost_after:
                    lines.give_back(attempt)
                    return
                is_lost_after -= 1
                answered.append(attempt.line.number)
                losses.append(attempt.num_losses)
                lines.done()

        async with asyncio.timeout(60):
            await asyncio.gather(*(taker(n) for n in (0, 2, 5, -1, -1)))
        assert sorted(answered) == list(range(1, num_lines + 1))
        assert lines.over.is_set()
        assert lines.num_done == num_lines
        if num_lines == 30:
            assert sum(losses) == 3

    asyncio.run(scenario())


def test_takers_wait_for_what_others_may_lose():
    async def scenario():
        lines = shared(job_of(1))
        attempt = await lines.take()
        waiting = [asyncio.ensure_future(lines.take()) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert not any(one.done() for one in waiting)
        lines.give_back(attempt)
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        (again,) = [one.result() for one in done]
        assert again == attempt._replace(num_losses=1)
        lines.done()
        async with asyncio.timeout(60):
            assert sorted(map(str, await asyncio.gather(*waiting))) == sorted([str(again), "None"])

    asyncio.run(scenario())


def test_a_line_that_comes_back_goes_before_a_queue_that_waits_for_it():
    """As results in the order of the input do."""

    async def scenario():
        first_is_answered = asyncio.Event()
        given = []

        async def take():
            if given:
                await first_is_answered.wait()
                return None
            given.append(1)
            return InputLine(1, b"")

        lines = shared(take)
        attempt = await lines.take()
        waiting = asyncio.ensure_future(lines.take())
        await asyncio.sleep(0.01)
        lines.give_back(attempt)
        async with asyncio.timeout(60):
            assert (await waiting).line.number == 1
        lines.done()
        first_is_answered.set()
        async with asyncio.timeout(60):
            assert await lines.take() is None
        await lines.close()

    asyncio.run(scenario())


def test_a_cancelled_taker_loses_nothing():
    async def scenario():
        gate = asyncio.Event()
        left = [InputLine(1, b"")]

        async def take():
            await gate.wait()
            return left.pop() if left else None

        lines = shared(take)
        cancelled = asyncio.ensure_future(lines.take())
        await asyncio.sleep(0.01)
        gate.set()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        async with asyncio.timeout(60):
            assert (await lines.take()).line.number == 1

    asyncio.run(scenario())
