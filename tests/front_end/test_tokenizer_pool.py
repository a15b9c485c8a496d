"""Chat templates and tokenizers that take for ever, take all memory or crash cost their own prompt alone."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
from fake_engine import FakeMultiproc, make_model_folder
from process_stat import is_alive, stat_fields
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from ringcore import EngineConfig
from ringcore.checkpoint.chat_template import conversation_json
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.errors import ConfigError, EngineDeadError, InvalidRequestError, QueueFullError, RingcoreError
from ringcore.front_end.tokenization.lane import _SLOW_S
from ringcore.front_end.tokenization.pool import _SHORT_BYTES, MAX_QUEUE_BYTES, TokenizerPool
from ringcore.front_end.tokenization.text_jobs import Decode, Encode, EncodeChat, Encoded, RenderChat, Rendered
from ringcore.tracing import Tracer

WAIT_S = 90.0
HI = Encode("hi")
LONG = Encode("x" * _SHORT_BYTES)

# What a conversation's first message says, this template does.
TEMPLATE = """\
{%- set word = messages[0]['content'] -%}
{%- if word == 'loop' -%}
{%- for a in range(99999) -%}{%- for b in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- elif word == 'swell' -%}{{ ('a' * 3000000000) | length }}
{%- else -%}{{ word }}{%- endif -%}
"""


def make_folder(path: Path, tokenizer: Tokenizer | None = None) -> str:
    folder = make_model_folder(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    if tokenizer is not None:
        tokenizer.save(str(path / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_pool():
    made = []

    def make(folder, **options) -> TokenizerPool:
        config = EngineConfig.from_options(
            model=folder,
            load_format="dummy",
            executor=FakeMultiproc,
            max_model_len=128,
            **{"tokenizer_timeout_s": WAIT_S} | options,
        )
        pool = TokenizerPool(config, Tracer())
        made.append(pool)
        pool.start()
        return pool

    yield make
    for pool in made:
        pids = pids_of(pool)
        pool.close()
        assert not any(map(is_alive, pids))
        assert not pool._thread.is_alive()
        assert pool.num_jobs == 0


def pids_of(pool) -> list[int]:
    return [lane.process.child.pid for lane in pool._lanes() if lane.process is not None]


def chat(word: str) -> EncodeChat:
    return EncodeChat(conversation_json([{"role": "user", "content": word}]), max_num_tokens=127)


def answer(pool, job):
    return pool.submit(job).result(WAIT_S)


def until(condition):
    deadline = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: stat_fields(pid)[0] == "T")


def test_the_answers_are_the_tokenizers_own(folder, make_pool):
    pool, local = make_pool(folder), load_tokenizer(folder)
    text = "é🙂 and so on"
    encoded = answer(pool, Encode(text, bad_words=["no"], return_token_texts=True))
    assert encoded.token_ids == local.encode(text)
    assert encoded.bad_words_token_ids == [local.encode("no"), local.encode(" no")]
    assert encoded.token_texts == [local.token_text(token_id) for token_id in encoded.token_ids]
    assert answer(pool, Encode(None, bad_words=["x"])).token_ids == []
    assert answer(pool, chat("hello")).token_ids == local.encode("hello")
    assert answer(pool, RenderChat(chat("hello").conversation, 3)) == Rendered("llo")
    assert answer(pool, Decode(local.encode(text))) == Rendered(text)
    assert answer(pool, Encode("y" * 99_999)).token_ids == local.encode("y" * 99_999)


def test_many_at_once_keep_their_answers(folder, make_pool):
    pool = make_pool(folder)
    texts = [str(number) * (1 + 300 * (number % 97 == 0)) for number in range(1000)]
    futures = [pool.submit(Encode(text)) for text in texts]
    assert [bytes(future.result(WAIT_S).token_ids).decode() for future in futures] == texts


def test_the_processes_are_bounded_and_know_no_torch(folder, make_pool):
    pool = make_pool(folder)
    answer(pool, HI)
    (pid,) = pids_of(pool)  # the long lane's is started when it is needed
    limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
    (space,) = [line.split() for line in limits if line.startswith("Max address space")]
    assert int(space[3]) < 8 << 30
    assert "torch" not in Path(f"/proc/{pid}/maps").read_text()


def test_a_template_that_loops_is_refused_in_time_and_holds_nobody_up(folder, make_pool):
    pool = make_pool(folder)
    answer(pool, HI)
    looping = pool.submit(chat("loop"))
    for _ in range(3):
        assert answer(pool, chat("hello")).token_ids == list(b"hello")
        assert not looping.done()
    (lane,) = pool._detached
    lane._timeout_s = 0.5  # which it has had
    with pytest.raises(InvalidRequestError, match=r"messages: .* longer than 0\.5 s for it; .*tokenizer_timeout_s"):
        looping.result(WAIT_S)
    until(lambda: not pool._detached)
    assert answer(pool, HI) == Encoded([104, 105], [])


def test_a_template_that_takes_all_memory_is_refused(folder, make_pool):
    pool = make_pool(folder)
    swelling, plain = pool.submit(chat("swell")), pool.submit(HI)
    with pytest.raises(InvalidRequestError, match=r"messages: .*memory"):
        swelling.result(WAIT_S)
    assert plain.result(WAIT_S).token_ids == [104, 105]


def tokenizer_of(folder: str) -> Tokenizer:
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def test_a_regular_expression_that_backtracks_is_an_error_of_the_prompt(folder, tmp_path, make_pool):
    tokenizer = tokenizer_of(folder)
    split = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    pool = make_pool(make_folder(tmp_path, tokenizer))
    futures = [pool.submit(Encode("a" * 40 + "b")), pool.submit(HI)]
    with pytest.raises(InvalidRequestError, match="prompt: the model's tokenizer fails at it"):
        futures[0].result(WAIT_S)
    assert futures[1].result(WAIT_S).token_ids == [104, 105]
    with pytest.raises(InvalidRequestError, match="fails at it"):  # in this process too, and no BaseException
        load_tokenizer(tmp_path).encode("a" * 40 + "b")


@pytest.mark.long_form
def test_normalizers_that_grow_a_text_cost_their_process_and_one_prompt(folder, tmp_path, make_pool):
    tokenizer = tokenizer_of(folder)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 2048)] * 4)
    pool = make_pool(make_folder(tmp_path, tokenizer))  # to load it is no harm
    futures = [pool.submit(Encode("a")), pool.submit(HI)]
    with pytest.raises(InvalidRequestError, match=r"prompt: the tokenizer's process died at it twice \(killed by"):
        futures[0].result(WAIT_S)
    assert futures[1].result(WAIT_S).token_ids == [104, 105]


@pytest.mark.parametrize("job", [HI, LONG], ids=["short", "long"])
def test_a_kill_while_it_is_at_work_changes_no_answer(folder, make_pool, job, caplog):
    pool = make_pool(folder)
    answer(pool, job)
    pid = pids_of(pool)[-1]
    stop(pid)
    futures = [pool.submit(job) for _ in range(3)]
    os.kill(pid, signal.SIGKILL)
    assert [len(future.result(WAIT_S).token_ids) for future in futures] == [len(job.text)] * 3
    assert "the tokenizer's process died: killed by SIGKILL" in caplog.text


def test_short_prompts_are_not_behind_long_ones(folder, make_pool):
    pool = make_pool(folder)
    answer(pool, LONG)
    long_pid = pool._long.process.child.pid
    stop(long_pid)
    long_ones = [pool.submit(LONG) for _ in range(5)]
    assert answer(pool, HI).token_ids == [104, 105]
    assert pool.num_jobs == 5
    os.kill(long_pid, signal.SIGCONT)
    wait(long_ones, WAIT_S)


def test_the_queue_is_bounded(folder, make_pool):
    pool = make_pool(folder, max_tokenizer_queue=3)
    answer(pool, HI)
    (pid,) = pids_of(pool)
    stop(pid)
    waiting = [pool.submit(HI) for _ in range(3)]
    with pytest.raises(QueueFullError, match="max_tokenizer_queue=3") as error:
        pool.submit(HI)
    assert error.value.details == {"num_waiting": 3, "limit": 3}
    assert pool.num_refused == 1
    waiting[2].cancel()
    waiting[2] = pool.submit(HI)  # a caller that goes makes room
    os.kill(pid, signal.SIGCONT)
    assert [future.result(WAIT_S).token_ids for future in waiting] == [[104, 105]] * 3


@pytest.mark.long_form
def test_the_queue_is_bounded_in_bytes(folder, make_pool):
    pool = make_pool(folder, tokenizer_timeout_s=WAIT_S / 9)
    answer(pool, LONG)
    stop(pool._long.process.child.pid)
    text = "x" * (MAX_QUEUE_BYTES // 4)
    waiting = [pool.submit(Encode(text)) for _ in range(3)]
    with pytest.raises(QueueFullError):
        pool.submit(Encode(text))
    assert answer(pool, HI).token_ids == [104, 105]
    for future in waiting:
        future.cancel()
    until(lambda: not pool._long.in_flight and not pool._long.queue)  # the one at work costs its process at its limit


def test_what_nobody_waits_for_is_not_executed(folder, make_pool):
    pool = make_pool(folder)
    answer(pool, LONG)
    stop(pool._long.process.child.pid)
    futures = [pool.submit(LONG) for _ in range(4)]
    for future in futures[1:]:
        assert future.cancel()
    assert len(pool._long.queue) == 0
    os.kill(pool._long.process.child.pid, signal.SIGCONT)
    assert len(futures[0].result(WAIT_S).token_ids) == _SHORT_BYTES


def test_the_end_is_the_error_of_all_that_wait(folder, make_pool):
    pool = make_pool(folder)
    answer(pool, HI)
    stop(pids_of(pool)[0])
    waiting = [pool.submit(HI) for _ in range(20)]
    pool.close()
    for future in waiting:
        with pytest.raises(EngineDeadError, match="closed"):
            future.result(0)
    with pytest.raises(EngineDeadError, match="closed"):
        pool.submit(HI)


def test_a_start_that_fails_is_told_and_tried_again(folder, tmp_path, make_pool):
    broken = Path(make_folder(tmp_path))
    good = (broken / "tokenizer.json").read_text()
    (broken / "tokenizer.json").write_text("{}")
    pool = make_pool(str(broken))
    with pytest.raises(RingcoreError, match="not a valid tokenizer"):
        answer(pool, HI)
    (broken / "tokenizer.json").write_text(good)
    assert answer(pool, HI).token_ids == [104, 105]


@pytest.mark.parametrize("options", [{"tokenizer_timeout_s": 0}, {"max_tokenizer_queue": 0}])
def test_options(folder, options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        EngineConfig.from_options(model=folder, load_format="dummy", **options)


def test_jobs_are_plain_data(folder):
    """A conversation has no object of the caller's in it."""
    assert json.loads(chat("a").conversation)["messages"] == [{"role": "user", "content": "a"}]


def test_a_process_without_cpu_time_is_not_slow(folder, make_pool):
    """A cancelled job does not cost the process, which would be replaced by one that needs more CPU time."""
    pool = make_pool(folder)
    pool.submit(HI).result(WAIT_S)
    (pid,) = pids_of(pool)
    os.kill(pid, signal.SIGSTOP)
    cancelled, other = pool.submit(HI), pool.submit(HI)
    cancelled.cancel()
    time.sleep(3 * _SLOW_S)
    os.kill(pid, signal.SIGCONT)
    assert isinstance(other.result(WAIT_S), Encoded)
    assert pids_of(pool) == [pid]
