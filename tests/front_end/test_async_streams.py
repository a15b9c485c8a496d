"""Many streams of one AsyncEngine at once: slow readers, readers that go away, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from contextlib import aclosing

import pytest
from bounded_asyncio import WAIT_S, run
from fake_engine import SLOW, FakeMultiproc, expected, make_model_folder

from ringcore import AsyncEngine, SamplingParams
from ringcore.errors import InvalidRequestError

NUM_STREAMS = 200


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    one = AsyncEngine(folder, load_format="dummy", executor=FakeMultiproc, max_model_len=128, block_size=8)
    yield one
    run(one.close())


async def stats_when_idle(engine):
    deadline = time.monotonic() + WAIT_S
    while True:
        stats = await engine._call(engine._client.call_engine, "stats")
        if stats["num_running"] == stats["num_waiting"] == 0:
            return stats
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)


async def until(condition, what):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


def num_call_threads() -> int:
    """Threads that come with calls to the engine and go without; whoever runs the tests has some of its own."""
    return sum(thread.name == "ringcore-call" for thread in threading.enumerate())


def prompt_of(index: int) -> list[int]:
    return [1 + index % 250, 7, index // 250]


async def read(engine, index, generator, ends):
    """One reader of `NUM_STREAMS`, which reads to the end or goes away in one of the ways there are."""
    kind = generator.choice(["cumulative", "delta", "final"])
    num_tokens, leaves_after = generator.randint(1, 40), generator.randint(0, 40)
    params = SamplingParams(max_tokens=num_tokens, output_kind=kind, n=generator.choice([1, 1, 1, 3]))
    way = generator.choice(["reads", "breaks", "closes", "drops", "aborts"])
    stream = engine.generate(prompt_of(index), params, request_id=f"s{index}")
    token_ids: list[int] = []
    async with aclosing(stream):
        async for output in stream:
            new = output.outputs[0].token_ids
            token_ids = token_ids + new if kind == "delta" else new
            assert token_ids == expected(prompt_of(index), num_tokens)[: len(token_ids)]
            if len(token_ids) < leaves_after:
                continue
            if way == "breaks":
                break
            if way == "closes":
                await stream.aclose()
            elif way == "drops":
                del stream
                return
            elif way == "aborts":
                await engine.abort(f"s{index}")
        else:
            ends.append(way)
            if way == "reads":
                assert len(token_ids) == num_tokens


async def until_cancelled(reading):
    await reading
    await asyncio.Event().wait()


async def crowd(engine, seed):
    """Streams that all run at once, a third of whose tasks are cancelled at some moment."""
    generator, ends = random.Random(seed), []
    readers = [read(engine, i, random.Random(seed + i), ends) for i in range(NUM_STREAMS)]
    leaving = generator.sample(range(NUM_STREAMS), NUM_STREAMS // 3)
    for i in leaving:  # also where all of it is read before
        readers[i] = until_cancelled(readers[i])
    tasks = [asyncio.ensure_future(one) for one in readers]
    is_over = lambda: all(task.done() for i, task in enumerate(tasks) if i not in leaving)  # noqa: E731
    await until(lambda: engine.num_unfinished > NUM_STREAMS // 4 or is_over(), "none runs")
    for i in leaving:
        tasks[i].cancel()
        if generator.random() < 0.2:
            await asyncio.sleep(0.002)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    failures = [r for r in results if r is not None and not isinstance(r, asyncio.CancelledError)]
    assert failures == []
    assert "reads" in ends
    assert all(isinstance(results[i], asyncio.CancelledError) for i in leaving)
    assert engine.num_unfinished == 0
    assert not engine._streams.opened.result().outputs.has_unfinished
    stats = await stats_when_idle(engine)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return stats


async def times_out(stream) -> None:
    """A reader that was held up finds a token, and waits for the next one."""
    while True:
        await asyncio.wait_for(anext(stream), 0.001)


def test_a_crowd_that_goes_away_at_random_leaves_nothing(engine):
    async def scenario():
        ready = await engine.start()
        await crowd(engine, 0)
        await until(lambda: num_call_threads() == 0, "calls have threads")
        gc.collect()
        num_fds, num_threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for seed in (1000, 2000):
            stats = await crowd(engine, seed)
            assert await engine.reset_prefix_cache() is True  # nobody holds a block
            stats = await stats_when_idle(engine)
            assert stats["num_free_blocks"] == ready.num_blocks
        await until(lambda: threading.active_count() <= num_threads, "a thread is left")
        assert len(os.listdir("/proc/self/fd")) <= num_fds

    run(scenario())


@pytest.mark.parametrize("way", ["cancels", "breaks", "drops", "closes", "times out"])
def test_a_reader_that_goes_away_ends_its_request_at_once(engine, way):
    async def scenario():
        stream = engine.generate([SLOW, 1], SamplingParams(max_tokens=100, n=2))
        await anext(stream)
        step = engine.stats.step
        assert engine.num_unfinished == 1
        if way == "cancels":
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "breaks":
            del stream
            async for _ in engine.generate([SLOW, 1], SamplingParams(max_tokens=100)):
                break
        elif way == "drops":
            del stream
        elif way == "closes":
            await stream.aclose()
        else:
            with pytest.raises(TimeoutError):
                await times_out(stream)
        assert engine.num_unfinished == 0  # here at once, in the engine within a step
        await stats_when_idle(engine)
        assert engine.stats.step - step < 90  # of 100, or 200: some were in flight, and the machine may be busy

    run(scenario())


def test_a_slow_reader_gets_what_came_meanwhile_as_one_and_holds_up_nobody(engine):
    async def scenario():
        params = SamplingParams(max_tokens=60, output_kind="delta")
        slow, fast = engine.generate([1, 2], params), engine.generate([3, 4], params)
        while (first := await anext(slow)).finished:  # this reader was held up too
            slow = engine.generate([1, 2], params)
        num_fast = [len(output.outputs[0].token_ids) async for output in fast]
        assert sum(num_fast) == 60
        await until(lambda: engine.num_unfinished == 0, "the slow reader's request goes on to its end")
        rest = [output async for output in slow]
        assert len(rest) == 1
        pieces = [first.outputs[0], rest[0].outputs[0]]
        assert [t for piece in pieces for t in piece.token_ids] == expected([1, 2], 60)

    run(scenario())


def test_an_engine_that_does_not_read_does_not_hold_up_the_loop(engine):
    async def scenario():
        pid = (await engine.start()).pids["engine"]
        params = SamplingParams(n=64, max_tokens=1, output_kind="final")
        os.kill(pid, signal.SIGSTOP)
        try:
            prompts = [[1 + i] * 120 for i in range(60)]  # several MB, which no socket takes
            streams = [engine.generate(prompt, params) for prompt in prompts]
            tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
            await until(lambda: engine.num_unfinished == 60, "they are not sent")
            await streams[7].aclose()
            assert not engine._streams._to_send.empty()  # the sender waits, and nobody else
        finally:
            os.kill(pid, signal.SIGCONT)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[7], StopAsyncIteration)
        del results[7], prompts[7]
        for prompt, output in zip(prompts, results, strict=True):
            assert [one.token_ids for one in output.outputs] == [expected(prompt, 1)] * 64
        await stats_when_idle(engine)

    run(scenario())


def test_readers_whose_loop_has_closed(engine):
    streams = []

    async def begin():
        streams.append(engine.generate([SLOW, 5], SamplingParams(max_tokens=100)))
        await anext(streams[0])

    run(begin())  # nobody closes the stream, and the loop is gone
    run(until(lambda: engine.num_unfinished == 0, "its request goes on"))
    assert run(stats_when_idle(engine))["num_running"] == 0


def test_a_text_longer_than_any_prompt_is_refused_by_its_length(engine):
    async def scenario():
        await engine.start()
        pid = engine._tokenizer_pool._short.process.child.pid
        os.kill(pid, signal.SIGSTOP)  # it is not asked
        try:
            for text in ("a word and another " * 20_000, "é" * 1000):
                with pytest.raises(InvalidRequestError, match=r"at least \d+ tokens and max_model_len is 128"):
                    await anext(engine.generate(text))
        finally:
            os.kill(pid, signal.SIGCONT)

    run(scenario())
