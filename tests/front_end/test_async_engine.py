"""AsyncEngine: what its streams give, and its calls, with a fake worker behind the engine process."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fake_engine import ROW_FAILS, SLOW, FakeMultiproc, expected, hurried, make_model_folder

from ringcore import LLM, AsyncEngine, AsyncEngineArgs, AsyncLLM, SamplingParams, TokensPrompt
from ringcore.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    RingcoreError,
    RpcTimeoutError,
    SleepingError,
    UnknownOptionError,
    WorkerError,
)

OPTIONS = {
    "load_format": "dummy",
    "executor": FakeMultiproc,
    "max_model_len": 128,
    "block_size": 8,
    "enable_sleep_mode": True,
}
WAIT_S = 90.0  # of what takes milliseconds, on a machine that may be busy with anything


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(folder):
    """One for all tests, each of which has a loop of its own."""
    one = AsyncEngine(folder, **OPTIONS)
    yield one
    run(one.close())


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, WAIT_S))


async def all_of(stream):
    return [output async for output in stream]


async def last_of(stream):
    return (await all_of(stream))[-1]


async def idle(engine):
    """The engine's own numbers, once nothing is under way."""
    deadline = time.monotonic() + WAIT_S
    while (stats := await engine._call(engine._client.call_engine, "stats"))["num_running"] or stats["num_waiting"]:
        assert time.monotonic() < deadline, stats
    return stats


def text_of(prompt: str, num_tokens: int) -> str:
    return bytes(expected(list(prompt.encode()), num_tokens)).decode()


def test_cumulative_outputs(engine):
    outputs = run(all_of(engine.generate("hello", SamplingParams(max_tokens=12))))
    full = text_of("hello", 12)
    assert outputs[-1].outputs[0].text == full
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    lengths = [len(o.outputs[0].token_ids) for o in outputs]
    assert lengths == sorted(set(lengths))  # an earlier output does not grow with the later ones
    for output, length in zip(outputs, lengths, strict=True):
        assert output.outputs[0].text == full[:length]
    assert (outputs[0].prompt, outputs[0].prompt_token_ids) == ("hello", list(b"hello"))
    metrics = outputs[-1].metrics
    assert metrics.arrival_s <= metrics.first_scheduled_s <= metrics.first_token_s <= metrics.finished_s
    assert outputs[0].metrics.finished_s is None or len(outputs) == 1


def test_deltas_are_the_whole_in_pieces(engine):
    params = SamplingParams(max_tokens=8, logprobs=1, output_kind="delta")
    pieces = []
    while len(pieces) < 2:  # a reader that was held up finds all of it at once
        pieces = [output.outputs[0] for output in run(all_of(engine.generate([SLOW, 1], params)))]
    assert all(piece.token_ids for piece in pieces)
    assert "".join(piece.text for piece in pieces) == bytes(expected([SLOW, 1], 8)).decode()
    assert [t for piece in pieces for t in piece.token_ids] == expected([SLOW, 1], 8)
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert pieces[-1].cumulative_logprob == -4.0
    assert pieces[-1].finish_reason == "length"


def test_one_final_output(engine):
    (output,) = run(all_of(engine.generate("hello", SamplingParams(max_tokens=30, output_kind="final"))))
    assert output.outputs[0].text == text_of("hello", 30)


def test_the_same_tokens_as_llm(engine, folder):
    prompts = ["one", "a longer prompt of more than eight tokens", "x" * 100]
    params = SamplingParams(max_tokens=9, stop=["q"], logprobs=2)
    with LLM(folder, **OPTIONS) as llm:
        whole = llm.generate(prompts, params, use_tqdm=False)

    async def together():
        return await asyncio.gather(*(last_of(engine.generate(p, params)) for p in prompts))

    assert [o.outputs for o in run(together())] == [o.outputs for o in whole]


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_several_completions(engine, kind):
    params = SamplingParams(n=3, max_tokens=10, seed=5, output_kind=kind)
    outputs = run(all_of(engine.generate("hello", params, request_id="three")))
    assert {output.request_id for output in outputs} == {"three"}
    assert all([one.index for one in output.outputs] == [0, 1, 2] for output in outputs)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index in range(3):
        texts = [output.outputs[index].text for output in outputs]
        assert ("".join(texts) if kind == "delta" else texts[-1]) == text_of("hello", 10)
    assert engine.num_unfinished == 0


def test_a_stop_string_ends_the_request_in_the_engine_too(engine):
    async def scenario():
        full = text_of("hello", 60)
        stop = full[20:23]
        output = await last_of(engine.generate("hello", SamplingParams(max_tokens=100, stop=[stop])))
        assert (output.outputs[0].text, output.outputs[0].stop_reason) == (full[: full.index(stop)], stop)
        assert (await idle(engine))["num_running"] == 0

    run(scenario())


def test_chat(engine):
    messages = [{"role": "user", "content": "hi"}]
    output = run(last_of(engine.chat(messages, SamplingParams(max_tokens=4), request_id="talk")))
    assert bytes(output.prompt_token_ids) == b"user:hi;A:"
    assert (output.request_id, output.outputs[0].text) == ("talk", text_of("user:hi;A:", 4))
    silent = run(last_of(engine.chat(messages, add_generation_prompt=False)))
    assert bytes(silent.prompt_token_ids) == b"user:hi;"
    with pytest.raises(InvalidRequestError):
        run(last_of(engine.chat("hello")))


def test_names_and_salts(engine):
    async def scenario():
        prompt = {"prompt": "a prompt that the prefix cache finds", "request_id": "theirs", "cache_salt": "a"}
        await engine.reset_prefix_cache()
        for salt, is_cached in (("b", False), ("b", True), (None, False), ("a", True)):
            output = await last_of(engine.generate(prompt, cache_salt=salt))
            assert (output.request_id, bool(output.num_cached_tokens)) == ("theirs", is_cached)
        assert (await last_of(engine.generate(prompt, request_id="mine"))).request_id == "mine"

    run(scenario())


WRONG = ["", [5, 4000], "x" * 128, "x" * 5000, {"prompt": "a", "cache_salt": 7}, {"promt": "a"}, 3.5]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda value: repr(value)[:20])
def test_a_wrong_prompt_is_an_error_of_its_stream(engine, wrong):
    stream = engine.generate(wrong)
    with pytest.raises((InvalidRequestError, UnknownOptionError)):
        run(anext(stream))
    with pytest.raises(StopAsyncIteration):
        run(anext(stream))
    assert engine.num_unfinished == 0


def test_sampling_params_of_a_wrong_type(engine):
    with pytest.raises(InvalidRequestError, match="give a SamplingParams"):
        run(anext(engine.generate("a", {"temperature": 0})))


def test_an_error_of_the_engine_is_of_one_stream(engine):
    async def scenario():
        good = asyncio.ensure_future(last_of(engine.generate("good")))
        with pytest.raises(WorkerError, match="not finite"):
            await last_of(engine.generate([ROW_FAILS], SamplingParams(n=2)))
        assert (await good).outputs[0].text == text_of("good", 16)
        assert (await idle(engine))["num_running"] == 0

    run(scenario())


def test_a_request_id_that_is_under_way(engine):
    async def scenario():
        first = engine.generate([SLOW, 1], SamplingParams(max_tokens=100), request_id="x")
        await anext(first)
        with pytest.raises(InvalidRequestError, match="request_id='x' is in use"):
            await anext(engine.generate("b", request_id="x"))
        assert len((await anext(first)).outputs[0].token_ids) > 1  # it goes on
        await first.aclose()
        await last_of(engine.generate("b", request_id="x"))

    run(scenario())


def test_a_stream_has_one_reader(engine):
    async def scenario():
        stream = engine.generate([SLOW, 1], SamplingParams(max_tokens=100, output_kind="final"))
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.02)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await reader
        assert (await idle(engine))["num_running"] == 0

    run(scenario())


def test_calls(engine, folder):
    async def scenario():
        assert await engine.collective_rpc("echo", ("x",), {"times": 2}) == ["0:xx"]
        assert await engine.collective_rpc("echo", ("x",), timeout=10, unique_reply_rank=0) == "0:x"
        with pytest.raises(WorkerError, match="no such thing"):
            await engine.collective_rpc("fail")
        with pytest.raises(RpcTimeoutError):
            await engine.collective_rpc("nap", (WAIT_S,), timeout=0.05)
        with hurried(folder):
            assert await engine.collective_rpc("echo", ("x",)) == ["0:x"]
        assert (await engine.health(timeout=WAIT_S)).state == "ready"
        assert engine.stats.num_running == 0
        await engine.pause("all")
        try:
            held = asyncio.ensure_future(last_of(engine.generate("held")))
            await asyncio.sleep(0.1)
            assert not held.done()
            assert engine.num_unfinished == 1
        finally:
            await engine.resume()
        assert (await held).outputs[0].text == text_of("held", 16)
        assert await engine.reset_prefix_cache() is True

    run(scenario())


def test_a_call_that_is_given_up_holds_up_nobody(engine, folder):
    async def scenario():
        task = asyncio.ensure_future(engine.collective_rpc("nap", (WAIT_S,)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with hurried(folder):
            assert await engine.collective_rpc("echo", ("x",)) == ["0:x"]

    run(scenario())


def test_the_loop_goes_on_during_calls(engine, folder):
    async def scenario():
        calls = [asyncio.ensure_future(engine.collective_rpc("nap", (WAIT_S,))) for _ in range(10)]
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert not any(call.done() for call in calls)
        with hurried(folder):
            await asyncio.gather(*calls)

    run(scenario())


def test_sleep_and_new_weights(engine, tmp_path):
    async def scenario():
        report = await engine.sleep()
        assert report.states == {"weights": "offloaded", "kv_cache": "discarded"}
        assert await engine.is_sleeping()
        with pytest.raises(SleepingError, match="wake_up"):
            await anext(engine.generate("a"))
        await engine.wake_up(["weights"])
        await engine.wake_up()
        assert (await last_of(engine.generate("a"))).outputs[0].text == text_of("a", 16)

        (tmp_path / "7").mkdir()
        await engine.start_weight_update()
        await engine.update_weights({"kind": "group", "number": 7})
        await engine.finish_weight_update()
        output = await last_of(engine.generate("a"))
        assert output.outputs[0].token_ids == expected([97], 16, weights=7)
        await engine.reload_weights(tmp_path / "7", timeout=10)
        await engine.start_weight_update()
        await engine.update_weights({"kind": "group", "number": 0})
        await engine.finish_weight_update()

    run(scenario())


def test_before_it_is_ready(folder):
    """As vLLM's users make and end one."""
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(folder, **OPTIONS))  # no loop is running
    with pytest.raises(RingcoreError, match=r"await start\(\) first"):
        _ = engine.ready

    async def scenario():
        assert (await engine.health()).state == "starting"
        ready = await asyncio.gather(engine.start(), engine.start())
        assert ready[0].max_model_len == engine.ready.max_model_len == engine.config.model.context_len == 128
        assert engine.get_tokenizer().decode([104, 105]) == "hi"
        prompt = TokensPrompt(prompt_token_ids=[97, 98])
        assert (await last_of(engine.generate(prompt, SamplingParams(max_tokens=1), "mine"))).request_id == "mine"

    run(scenario())
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="was closed"):
        run(last_of(engine.generate([97])))


def test_wrong_options(folder):
    with pytest.raises(UnknownOptionError, match="did you mean 'max_model_len'"):
        AsyncEngine(folder, max_model_length=5)
    with pytest.raises(ConfigError, match="give 1 or 2"):
        AsyncEngine(folder, **OPTIONS, steps_in_flight=3)
    with pytest.raises(ModelLoadError, match="no/such"):
        AsyncEngine("./no/such/folder")


def test_two_engines_and_loops_in_two_threads(folder, engine):
    texts: dict[str, list[str]] = {}

    async def together(name, engines):
        async with AsyncEngine(folder, **OPTIONS) as own:
            outputs = [last_of(one.generate(name, SamplingParams(max_tokens=20))) for one in [*engines, own]]
            texts[name] = [output.outputs[0].text for output in await asyncio.gather(*outputs)]

    threads = [threading.Thread(target=lambda n=n: run(together(n, [engine]))) for n in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert texts == {name: [text_of(name, 20)] * 2 for name in ("left", "right")}
