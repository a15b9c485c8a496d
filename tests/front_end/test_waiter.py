"""Waiter: as a future, but that it is awaited again and again, and runs its task when it is set."""

import asyncio
import contextvars

import pytest

from ringcore.front_end.waiter import Waiter, set_all

NAME = contextvars.ContextVar("NAME", default="none")


def run(main):
    return asyncio.run(asyncio.wait_for(main(), 60))


class Reader:
    """A task that waits `num_waits` times, and notes each."""

    def __init__(self, num_waits=3):
        self.waiter = Waiter(asyncio.get_running_loop())
        self.seen = []
        self.task = asyncio.create_task(self._run(num_waits))

    async def _run(self, num_waits):
        for number in range(num_waits):
            await self.waiter
            self.seen.append(number)


def test_each_set_ends_one_wait_at_once():
    async def main():
        reader = Reader()
        reader.waiter.set()  # it does not wait yet: that is not kept
        await asyncio.sleep(0)
        seen = []
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def set_twice():
            for _ in range(2):
                reader.waiter.set()
                seen.append(list(reader.seen))
            done.set_result(None)

        loop.call_soon(set_twice)
        await done
        assert seen == [[0], [0, 1]]
        loop.call_soon(reader.waiter.set)
        await reader.task
        assert reader.seen == [0, 1, 2]
        reader.waiter.set()  # no task waits

    run(main)


def test_a_task_runs_in_its_own_context_and_as_the_current_one():
    async def main():
        waiter = Waiter(asyncio.get_running_loop())

        async def look():
            NAME.set("reader")
            await waiter
            return NAME.get(), asyncio.current_task()

        task = asyncio.create_task(look())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(waiter.set)
        assert await task == ("reader", task)
        assert NAME.get() == "none"

    run(main)


@pytest.mark.parametrize("is_set", [False, True])
def test_a_cancelled_wait_ends_as_such(is_set):
    async def main():
        reader = Reader()
        await asyncio.sleep(0)
        assert reader.task.cancel("why")
        if is_set:
            asyncio.get_running_loop().call_soon(reader.waiter.set)  # after the cancellation, which wins
        with pytest.raises(asyncio.CancelledError, match="why"):
            await reader.task
        assert reader.seen == []
        assert not reader.waiter.cancel()

    run(main)


def test_a_wait_goes_on_after_a_deadline():
    async def main():
        waiter, has_timed_out = Waiter(asyncio.get_running_loop()), asyncio.Event()

        async def wait_twice():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await waiter
            has_timed_out.set()
            await waiter
            return "set"

        task = asyncio.create_task(wait_twice())
        await has_timed_out.wait()
        asyncio.get_running_loop().call_soon(waiter.set)
        assert await task == "set"

    run(main)


def test_a_task_cancelled_before_it_waits():
    async def main():
        reader = Reader()
        reader.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader.task

    run(main)


def test_an_error_of_one_task_does_not_reach_the_others():
    async def main():
        loop = asyncio.get_running_loop()
        first, last = Reader(1), Reader(1)
        failing = Waiter(loop)

        async def fail():
            await failing
            raise ValueError("of this task")

        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        loop.call_soon(set_all, [first.waiter, failing, last.waiter])
        await asyncio.gather(first.task, last.task)
        with pytest.raises(ValueError, match="of this task"):
            await task

    run(main)


def test_an_exit_of_one_task_leaves_the_others_to_the_loop():
    loop = asyncio.new_event_loop()
    try:
        leaving, readers = Waiter(loop), []

        async def leave():
            await leaving
            raise SystemExit(3)

        async def begin():
            readers.extend([Reader(1), Reader(1)])
            await asyncio.sleep(0)

        task = loop.create_task(leave())
        loop.run_until_complete(begin())
        loop.call_soon(set_all, [readers[0].waiter, leaving, readers[1].waiter])
        with pytest.raises(SystemExit):
            loop.run_until_complete(asyncio.sleep(60))
        with pytest.raises(SystemExit):
            task.result()
        loop.run_until_complete(asyncio.gather(*(one.task for one in readers)))
        assert [one.seen for one in readers] == [[0], [0]]
    finally:
        loop.close()
