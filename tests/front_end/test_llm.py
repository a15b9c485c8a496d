"""LLM: prompts to texts through the engine process, with a fake worker behind it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from documented import python_blocks
from fake_engine import KILLS_ONCE, ROW_FAILS, SLOW, FakeMultiproc, expected, make_model_folder
from process_stat import children, is_alive

import ringcore
from ringcore import LLM, EngineArgs, RequestOutput, SamplingParams
from ringcore.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelLoadError,
    UnknownOptionError,
    WorkerError,
)
from ringcore.testing.fake_prompts import POOLED_SIZE

OPTIONS = {"load_format": "dummy", "executor": FakeMultiproc, "max_model_len": 128, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **OPTIONS) as engine:
        yield engine


def generate(llm, prompts, params=None, **kwargs):
    return llm.generate(prompts, params, use_tqdm=False, **kwargs)


def text_of(prompt: str, num_tokens: int) -> str:
    return bytes(expected(list(prompt.encode()), num_tokens)).decode()


def test_outputs_are_in_the_order_of_the_prompts(llm):
    prompts = ["one", "a longer prompt of more than eight tokens", "x"]
    # The first takes longest, so that they finish in another order.
    outputs = generate(llm, prompts, [SamplingParams(max_tokens=n) for n in (30, 3, 9)])
    assert [o.prompt for o in outputs] == prompts
    assert [o.outputs[0].text for o in outputs] == [text_of(p, n) for p, n in zip(prompts, (30, 3, 9), strict=True)]
    assert all(o.outputs[0].finish_reason == "length" and o.finished and o.error is None for o in outputs)
    assert len({o.request_id for o in outputs}) == 3


@pytest.mark.parametrize("prompt", ["ab", [97, 98], {"prompt": "ab"}, {"prompt_token_ids": [97, 98]}])
def test_every_form_of_a_prompt(llm, prompt):
    (one,) = generate(llm, prompt)
    (also,) = generate(llm, [prompt])
    assert one.prompt_token_ids == also.prompt_token_ids == [97, 98]
    assert one.outputs[0].text == also.outputs[0].text == text_of("ab", 16)  # SamplingParams() has max_tokens=16


@pytest.mark.parametrize("page", ["README.md", "docs/guide/from_vllm.md"])
def test_the_programs_of_the_pages(llm, page, monkeypatch, capsys):
    """As they are, but for the model; their engine options are checked."""

    def made(model: str, **options):
        EngineArgs(model, **options)
        return nullcontext(llm)

    monkeypatch.setattr(ringcore, "LLM", made)
    (program,) = python_blocks(page)
    exec(program, {})  # noqa: S102
    assert text_of("The capital of France is", 16) in capsys.readouterr().out


def test_no_prompts_no_outputs(llm):
    assert generate(llm, []) == []


def test_stop_strings_end_requests_in_the_engine_too(llm):
    full = text_of("hello", 60)
    stop = full[20:23]
    at = full.index(stop)
    (output,) = generate(llm, "hello", SamplingParams(max_tokens=60, stop=[stop]))
    completion = output.outputs[0]
    assert (completion.text, completion.stop_reason) == (full[:at], stop)
    assert completion.token_ids == list(full[: at + len(stop)].encode())
    assert llm._client.call_engine("stats")["num_running"] == 0


def test_several_completions_of_a_prompt(llm):
    params = [SamplingParams(n=3, max_tokens=5, seed=1), SamplingParams(max_tokens=7, output_kind="delta")]
    three, one = generate(llm, ["hello", "x"], params)
    assert [c.index for c in three.outputs] == [0, 1, 2]
    assert [c.text for c in three.outputs] == [text_of("hello", 5)] * 3
    assert [c.text for c in one.outputs] == [text_of("x", 7)]  # whole, whatever a stream would give
    with pytest.raises(WorkerError, match=r"^prompt 0: "):
        generate(llm, [[ROW_FAILS]], SamplingParams(n=2))
    assert llm._client.call_engine("stats")["num_running"] == 0


def test_a_stream_by_request(llm):
    prompts = ["one", "two", "three"]
    outputs = list(llm.stream(prompts, [SamplingParams(max_tokens=n) for n in (30, 20, 3)]))
    assert [o.prompt for o in outputs] == ["three", "two", "one"]  # as they finish
    assert [o.outputs[0].text for o in outputs] == [text_of("three", 3), text_of("two", 20), text_of("one", 30)]


@pytest.mark.parametrize("kind", ["cumulative", "delta", "final"])
def test_a_stream_by_token(llm, kind):
    params = SamplingParams(max_tokens=12, output_kind=kind)
    texts: dict[str, list[str]] = {"one": [], "two": []}
    for output in llm.stream(list(texts), params, by="token"):
        texts[output.prompt].append(output.outputs[0].text)
    for prompt, pieces in texts.items():
        assert ("".join(pieces) if kind == "delta" else pieces[-1]) == text_of(prompt, 12)
        assert (len(pieces) == 1) == (kind == "final")


def test_leaving_a_stream_ends_its_requests(llm):
    for _ in llm.stream([[SLOW, 1], [SLOW, 2]], SamplingParams(max_tokens=100), by="token"):
        with pytest.raises(InvalidRequestError, match="this thread has an unfinished stream"):
            generate(llm, "inside")
        break
    assert generate(llm, "after")[0].outputs[0].text == text_of("after", 16)
    assert llm._client.call_engine("stats")["num_running"] == 0


def test_a_stream_takes_turns(llm):
    stream = llm.stream(["one"], SamplingParams(max_tokens=20), by="token")
    next(stream)
    others: list[RequestOutput] = []
    thread = threading.Thread(target=lambda: others.extend(generate(llm, "other")))
    thread.start()
    time.sleep(0.05)
    assert others == []
    *_, last = stream
    thread.join(60)
    assert (last.outputs[0].text, others[0].outputs[0].text) == (text_of("one", 20), text_of("other", 16))


def test_errors_in_a_stream(llm):
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: "):
        llm.stream(["good", ""])  # before it is begun
    with pytest.raises(InvalidRequestError, match="by='word': give 'request' or 'token'"):
        llm.stream(["good"], by="word")
    prompts = ["good", [ROW_FAILS], "fine"]
    stream = llm.stream(prompts)
    assert sorted(next(stream).prompt for _ in range(2)) == ["fine", "good"]
    with pytest.raises(WorkerError, match=r"^prompt 1: .*not finite"):
        next(stream)
    outputs = list(llm.stream([*prompts, ""], on_error="return"))
    assert len(outputs) == 4
    assert [type(o.error) for o in outputs if o.error] == [InvalidRequestError, WorkerError]


def test_the_same_request_id_again(llm):
    for _ in range(2):  # the second must not get what is late of the first
        (output,) = generate(
            llm, {"prompt": "hello", "request_id": "mine"}, SamplingParams(max_tokens=60, stop=[text_of("hello", 1)])
        )
        assert output.request_id == "mine"
        assert output.outputs[0].finish_reason == "stop"


def test_log_probabilities(llm):
    (output,) = generate(llm, "a", SamplingParams(max_tokens=3, logprobs=2))
    completion = output.outputs[0]
    assert [next(iter(row)) for row in completion.logprobs] == completion.token_ids
    assert completion.cumulative_logprob == -1.5


def test_metrics_and_cached_tokens(llm):
    prompt = "a prompt that is found in the prefix cache"
    assert llm.reset_prefix_cache() is True
    first, second = (generate(llm, prompt)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(prompt) - 1) // 8 * 8
    metrics = second.metrics
    assert metrics.arrival_s <= metrics.first_scheduled_s <= metrics.first_token_s <= metrics.finished_s
    (salted,) = generate(llm, {"prompt": prompt, "cache_salt": "other"})
    assert salted.num_cached_tokens == 0


def test_chat(llm):
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, use_tqdm=False)
    assert bytes(one.prompt_token_ids) == b"user:hi;A:"
    two = llm.chat([conversation, [*conversation, {"role": "assistant", "content": "yes"}]], use_tqdm=False)
    assert bytes(two[1].prompt_token_ids) == b"user:hi;assistant:yes;A:"
    assert two[0].outputs[0].text == one.outputs[0].text == text_of("user:hi;A:", 16)


def test_chat_with_tools_and_variables_of_the_template(llm):
    conversation, tool = [{"role": "user", "content": "hi"}], {"type": "function", "function": {"name": "f"}}
    (one,) = llm.chat(conversation, use_tqdm=False, tools=[tool], chat_template_kwargs={"thinking": True})
    assert bytes(one.prompt_token_ids) == b"user:hi;A:"  # a template that knows neither
    with pytest.raises(InvalidRequestError, match="tool 0 has no 'name'"):
        llm.chat(conversation, use_tqdm=False, tools=[{"type": "function"}])
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs"):
        llm.chat(conversation, use_tqdm=False, chat_template_kwargs={"messages": []})


def test_wrong_conversations(llm):
    with pytest.raises(InvalidRequestError, match="messages"):
        llm.chat("hello", use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="prompt 1"):
        llm.chat([[{"role": "user", "content": "x"}], "hello"], use_tqdm=False)


WRONG = [
    "",
    [5, 4000],
    "x" * 128,
    {"prompt": "a", "cache_salt": 7},
    {"promt": "a"},
    3.5,
]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
def test_a_wrong_prompt_is_refused_before_any_is_sent(llm, wrong):
    before = llm._client.call_engine("stats")["step"]
    with pytest.raises((InvalidRequestError, UnknownOptionError), match=r"^prompt 1: ") as caught:
        generate(llm, ["good", wrong])
    assert caught.value.details["index"] == 1
    assert llm._client.call_engine("stats")["step"] == before


def test_wrong_prompts_have_their_error_in_place_and_the_others_go_on(llm):
    good = ["first", "second", "third"]
    alone = [o.outputs[0].text for o in generate(llm, good)]
    mixed = [good[0], *WRONG[:3], good[1], *WRONG[3:], good[2]]
    outputs = generate(llm, mixed, on_error="return")
    assert [o.outputs[0].text for o in outputs if o.error is None] == alone
    failed = [o for o in outputs if o.error is not None]
    assert len(failed) == len(WRONG)
    assert all(isinstance(o, RequestOutput) and o.finished and not o.outputs for o in failed)
    assert [o.error.details["index"] for o in failed if isinstance(o.error, InvalidRequestError)] == [1, 2, 3, 5, 7]


def test_an_error_of_the_engine(llm):
    prompts = ["good", [ROW_FAILS], "fine"]
    with pytest.raises(WorkerError, match=r"^prompt 1: .*not finite"):
        generate(llm, prompts)
    outputs = generate(llm, prompts, on_error="return")
    assert isinstance(outputs[1].error, WorkerError)
    assert [outputs[i].outputs[0].text for i in (0, 2)] == [text_of("good", 16), text_of("fine", 16)]


def test_wrong_arguments(llm):
    with pytest.raises(InvalidRequestError, match="2 for 1 prompts"):
        generate(llm, ["a"], [SamplingParams(), SamplingParams()])
    with pytest.raises(InvalidRequestError, match="give a SamplingParams"):
        generate(llm, ["a"], {"temperature": 0})
    with pytest.raises(InvalidRequestError, match="on_error='ignore'"):
        generate(llm, ["a"], on_error="ignore")
    with pytest.raises(InvalidRequestError, match="request_id='x' occurs twice"):
        generate(llm, [{"prompt": "a", "request_id": "x"}, {"prompt": "b", "request_id": "x"}])


def test_a_progress_bar_on_stderr(llm, capsys):
    llm.generate(["a", "b"])
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2/2" in printed.err
    assert "output tokens/s" in printed.err


def test_collective_rpc_and_tokenizer(llm):
    assert llm.collective_rpc("echo", ("x",), {"times": 2}) == ["0:xx"]
    assert llm.collective_rpc("echo", ("x",), timeout=60, unique_reply_rank=0) == "0:x"
    with pytest.raises(InvalidRequestError, match="allow_callables"):
        llm.collective_rpc(lambda worker: worker.rank)
    assert llm.get_tokenizer().decode([104, 105]) == "hi"
    assert llm.ready.max_model_len == 128


def test_health(folder, llm):
    health = llm.health(timeout=60)
    assert (health.state, len(health.ranks)) == ("ready", 1)
    closed = LLM(folder, **OPTIONS)
    closed.close()
    assert closed.health().state == "dead"
    assert closed.ready.max_model_len == 128


def test_a_worker_that_dies_costs_no_token(tmp_path):
    prompts = [[KILLS_ONCE, 1, 2], "another prompt", "x"]
    with LLM(make_model_folder(tmp_path), **OPTIONS, max_worker_restarts=1) as llm:
        before = llm.ready.pids["worker 0"]
        outputs = generate(llm, prompts, SamplingParams(max_tokens=25))
        assert outputs[0].outputs[0].token_ids == expected([KILLS_ONCE, 1, 2], 25)
        assert [o.outputs[0].text for o in outputs[1:]] == [text_of(p, 25) for p in prompts[1:]]
        assert llm.ready.pids["worker 0"] != before
        assert llm.health(timeout=60).num_restarts == 1


def test_generating_in_two_threads_takes_turns(llm):
    texts: dict[str, str] = {}

    def run(prompt):
        texts[prompt] = generate(llm, prompt, SamplingParams(max_tokens=20))[0].outputs[0].text

    threads = [threading.Thread(target=run, args=(p,)) for p in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == {p: text_of(p, 20) for p in ("left", "right")}


def test_an_interrupt_leaves_the_engine_usable(llm):
    def interrupt():
        while llm._client.call_engine("stats")["num_running"] < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [[SLOW, 1], [SLOW, 2]], SamplingParams(max_tokens=100))
    thread.join()
    assert generate(llm, "after")[0].outputs[0].text == text_of("after", 16)
    assert llm._client.call_engine("stats")["num_running"] == 0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"max_model_length": 5}, UnknownOptionError, "did you mean 'max_model_len'"),
        ({"steps_in_flight": 3}, ConfigError, "give 1 or 2"),
        ({"max_model_len": 100_000}, ConfigError, "lower it"),
        ({"tokenizer": "/no/such/folder"}, ModelLoadError, "no/such"),
        ({"kv_cache_bytes": 3000}, CapacityError, "lower max_model_len to 32"),
    ],
)
def test_errors_at_construction(folder, options, error, says):
    before = children()
    with pytest.raises(error, match=says) as caught:
        LLM(folder, **(OPTIONS | options))
    left = set(filter(is_alive, children())).difference(before)
    assert not left, f"{left} live as long as {caught.value!r}"


def test_a_missing_folder():
    with pytest.raises(ModelLoadError, match="no/such"):
        LLM("./no/such/folder")


def test_after_close(folder):
    llm = LLM(Path(folder), **OPTIONS)
    assert generate(llm, "a")[0].outputs[0].text == text_of("a", 16)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        generate(llm, "a")


SCRIPT = """
    import sys
    sys.path.insert(0, {tests!r})
    from fake_engine import FakeMultiproc
    from ringcore import LLM, SamplingParams

    print("once")
    llm = LLM({folder!r}, load_format="dummy", executor=FakeMultiproc, max_model_len=64)
    print(llm.ready.pids["engine"], llm.ready.pids["worker 0"])
    print(llm.generate("ab", SamplingParams(max_tokens=5), use_tqdm=False)[0].outputs[0].text)
    {end}
"""


@pytest.mark.parametrize("end", ["", "import os; os.kill(os.getpid(), 9)"])
def test_a_script_without_a_main_guard(folder, tmp_path, end):
    script = tmp_path / "script.py"
    tests = str(Path(__file__).parents[1])
    script.write_text(textwrap.dedent(SCRIPT.format(tests=tests, folder=folder, end=end)))
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(tmp_path),
        },
    )
    once, pids, text = ran.stdout.splitlines()
    assert once == "once"
    assert text == text_of("ab", 5)
    assert ran.returncode == (-9 if "kill" in end else 0)
    assert ran.stderr == ""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids.split()):
        assert time.monotonic() < deadline, "a process outlived its script"
        time.sleep(0.02)
    assert [p.name for p in tmp_path.iterdir()] == ["script.py"]


def test_embeddings(llm):
    """Of prompts that share a prefix, in one step and beside others; the fake worker's states tell their tokens."""
    prompts = [[97] * 8 + [98], [97] * 8 + [99, 99]]
    last = np.eye(POOLED_SIZE, dtype=np.float32)
    for _ in range(2):  # the second time with cached blocks
        means = llm.embed(prompts, "mean", normalize=False)
        assert means[0] == pytest.approx((8 * last[97 % POOLED_SIZE] + last[98 % POOLED_SIZE]) / 9)
        assert means[1] == pytest.approx((8 * last[97 % POOLED_SIZE] + 2 * last[99 % POOLED_SIZE]) / 10)
        lasts = llm.embed(prompts)
        assert [one.tolist() for one in lasts] == [last[98 % POOLED_SIZE].tolist(), last[99 % POOLED_SIZE].tolist()]
    (unit,) = llm.embed("ab", "mean")
    assert (unit.dtype, np.linalg.norm(unit)) == (np.float32, pytest.approx(1))


def test_a_pooled_prompt_beside_tokens(llm):
    params = [SamplingParams(max_tokens=3, pooling="last", n=2), SamplingParams(max_tokens=3)]
    asked, other = llm.generate(["ab", "ab"], params)
    assert asked.pooled.tolist() == np.eye(POOLED_SIZE)[ord("b") % POOLED_SIZE].tolist()
    assert [one.text for one in asked.outputs] == [other.outputs[0].text] * 2
    assert other.pooled is None
    streamed = [output.pooled is not None for output in llm.stream("ab", params[0], by="token")]
    assert streamed
    assert all(streamed)


def test_a_pooling_that_there_is_not():
    with pytest.raises(InvalidRequestError, match="pooling='max': give one of last, mean"):
        SamplingParams(pooling="max")
