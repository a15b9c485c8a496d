"""What is asked, when, and what comes of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, pstdev

import pytest
from fake_engine import make_model_folder
from raw_service import STALL_S, RawService

from ringcore.bench.figures import Figures
from ringcore.bench.load import Answer, Failure, arrival_times, play
from ringcore.bench.prompts import BenchRequest, Lengths, PromptShape, make_prompts, read_dataset
from ringcore.bench.targets import HttpTarget
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.http_client import OpenAIClient


@pytest.fixture(scope="module")
def service():
    with RawService() as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(make_model_folder(tmp_path_factory.mktemp("bytes")))


def ask(service, requests, times=None, concurrency=None, timeout_s=None, **target):
    async def run():
        async with OpenAIClient(service.url, "key") as client:
            return await play(HttpTarget(client, "raw", **target), requests, times, concurrency, timeout_s)

    return asyncio.run(run())


# -------------------------------------------------------------------------------------------------------------------
# Arrivals.


def test_arrivals_are_one_pattern_stretched_by_the_rate():
    slow, fast = arrival_times(2000, 1.0, 1.0, seed=3), arrival_times(2000, 4.0, 1.0, seed=3)
    assert slow == pytest.approx([4 * at for at in fast])
    assert slow[-1] / 2000 == pytest.approx(1.0, rel=0.1)
    assert arrival_times(5, 1.0, 1.0, seed=4) != slow[:5]
    assert arrival_times(3, float("inf"), 1.0, seed=0) == [0.0] * 3


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness):
    """The deviation of a gamma distribution over its mean is 1 / sqrt(shape)."""
    times = arrival_times(20_000, 2.0, burstiness, seed=1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert mean(gaps) == pytest.approx(0.5, rel=0.05)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.05)


# -------------------------------------------------------------------------------------------------------------------
# Prompts.


def test_lengths():
    assert Lengths.of("x", "7") == Lengths(7, 7)
    assert Lengths.of("x", "7-9") == Lengths(7, 9)
    for text in ("0", "9-7", "a", "3-", "-3"):
        with pytest.raises(InvalidRequestError, match="give a number of tokens"):
            Lengths.of("x", text)


@pytest.mark.parametrize("as_text", [False, True])
def test_synthetic_prompts_have_exactly_their_length(tokenizer, as_text):
    shape = PromptShape(Lengths(20, 24), Lengths(3, 5))
    made = make_prompts(40, shape, tokenizer, as_text=as_text, is_chat=False, seed=1)
    for request in made:
        ids = tokenizer.encode(request.prompt) if as_text else request.prompt
        assert len(ids) == request.num_prompt_tokens
        assert all(chr(id_).isalpha() for id_ in ids)
    assert {request.num_prompt_tokens for request in made} == set(range(20, 25))
    assert {request.max_tokens for request in made} == {3, 4, 5}
    assert len({str(request.prompt)[:60] for request in made}) == 40  # no cache helps
    assert make_prompts(40, shape, tokenizer, as_text=as_text, is_chat=False, seed=1) == made
    assert make_prompts(40, shape, tokenizer, as_text=as_text, is_chat=False, seed=2) != made


def test_words_that_merge_with_others(tmp_path):
    """Two tokens side by side may be one when their text is encoded."""
    file = Path(make_model_folder(tmp_path)) / "tokenizer.json"
    made = json.loads(file.read_text())
    pairs = [a + b for a in "acegikmoq" for b in "bdfhjlnpr"]
    made["model"]["vocab"] |= {pair: 257 + i for i, pair in enumerate(pairs)}
    made["model"]["merges"] = [list(pair) for pair in pairs]
    file.write_text(json.dumps(made))
    merging = load_tokenizer(str(tmp_path))
    assert len(merging.encode("abcd")) == 2
    shape = PromptShape(Lengths(300, 300), Lengths(1, 1), prefix_tokens=100)
    requests = make_prompts(5, shape, merging, as_text=True, is_chat=False, seed=0)
    assert [len(merging.encode(request.prompt)) for request in requests] == [300] * 5
    assert len({request.prompt[:90] for request in requests}) == 1


def test_prefixes_are_shared(tokenizer):
    shape = PromptShape(Lengths(20, 20), Lengths(1, 1), prefix_tokens=16, num_prefixes=2)
    made = make_prompts(50, shape, tokenizer, as_text=False, is_chat=False, seed=1)
    assert len({tuple(request.prompt[:16]) for request in made}) == 2
    assert len({tuple(request.prompt[16:]) for request in made}) == 50
    assert {len(request.prompt) for request in made} == {20}
    wrong = PromptShape(Lengths(16, 20), Lengths(1, 1), prefix_tokens=16)
    with pytest.raises(InvalidRequestError, match="give fewer than prompt_tokens, 16"):
        make_prompts(1, wrong, tokenizer, as_text=False, is_chat=False, seed=1)


def test_without_a_tokenizer_a_token_is_a_word():
    shape = PromptShape(Lengths(9, 9), Lengths(1, 1), prefix_tokens=4)
    made = make_prompts(9, shape, None, as_text=False, is_chat=False, seed=1)
    assert {len(request.prompt.split()) for request in made} == {9}
    assert {tuple(request.prompt.split()[:4]) for request in made} == {tuple(made[0].prompt.split()[:4])}
    (chat, *_) = make_prompts(1, shape, None, as_text=False, is_chat=True, seed=1)
    assert chat.is_chat
    assert len(chat.prompt[0]["content"].split()) == 9


def test_a_dataset(tmp_path, tokenizer):
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "abc", "max_tokens": 5}\n{"prompt": [1, 2]}\n{"messages": [{"role": "user"}]}\n')
    read = read_dataset(file, 4, Lengths(8, 8), tokenizer, 0)
    assert [(r.prompt, r.max_tokens, r.num_prompt_tokens) for r in read] == [
        ("abc", 5, 3),
        ([1, 2], 8, 2),
        ([{"role": "user"}], 8, None),
        ("abc", 5, 3),
    ]
    assert len(read_dataset(file, None, Lengths(8, 8), None, 0)) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no requests"),
        ('{"prompt": "a"}\n{"max_tokens": 3}', "line 2: prompt: give it, or messages"),
        ('{"prompt": "a", "messages": []}', "line 1: prompt: give it, or messages"),
        ("{", "line 1: line: it is no JSON"),
    ],
)
def test_what_is_wrong_with_a_dataset(tmp_path, text, says):
    file = tmp_path / "requests.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidRequestError, match=says):
        read_dataset(file, None, Lengths(8, 8), None, 0)


# -------------------------------------------------------------------------------------------------------------------
# Answers.


@pytest.mark.parametrize("is_streamed", [True, False])
def test_answers_of_a_service(service, is_streamed):
    service.bodies.clear()
    asked = [BenchRequest("a", 4), BenchRequest([1, 2, 3], 5, 3), BenchRequest([{"role": "user", "content": "x"}], 6)]
    records = ask(service, asked[: 3 if is_streamed else 2], is_streamed=is_streamed, fields={"top_k": 3})
    for record in records:
        answer = record.outcome
        assert isinstance(answer, Answer), answer
        assert len(answer.text_s) == (record.request.max_tokens if is_streamed else 1)
        assert answer.text_s == sorted(answer.text_s)
        assert (answer.num_output_tokens, answer.num_prompt_tokens) == (record.request.max_tokens, 7)
        assert record.due_s <= record.sent_s <= answer.text_s[0] <= record.ended_s
    (asked_ids,) = [one for one in service.bodies if one[1].get("prompt") == [1, 2, 3]]
    path, body, headers = asked_ids
    assert path == "/v1/completions"
    assert (body["max_tokens"], body["ignore_eos"], body["top_k"], body["model"]) == (5, True, 3, "raw")
    assert headers["Authorization"] == "Bearer key"
    if is_streamed:
        assert [path for path, body, _ in service.bodies if "messages" in body] == ["/v1/chat/completions"]


def test_a_service_that_counts_no_tokens(service):
    (record,) = ask(service, [BenchRequest("FAULT-usage", 4, 9)])
    assert (record.outcome.num_output_tokens, record.outcome.num_prompt_tokens) == (4, 9)


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("status", "http 503", "busy"),
        ("cut", "cut off", ""),
        ("done", "cut off", r"without \[DONE\]"),
        ("error", "error in stream", "out of order"),
        ("form", "no answer", "not OpenAI's form"),
        ("text", "no answer", "without text"),
        ("slow", "timeout", "within 0.3 s"),
    ],
)
def test_failures_by_kind(service, fault, kind, says):
    asked = [BenchRequest("a", 4), BenchRequest(f"FAULT-{fault}", 4)]
    good, bad = ask(service, asked, timeout_s=0.3 if fault == "slow" else 60.0)
    if fault == "slow" and not isinstance(good.outcome, Answer):  # this machine may be slow too
        (good,) = ask(service, asked[:1], timeout_s=60.0)
    assert isinstance(good.outcome, Answer)
    assert isinstance(bad.outcome, Failure)
    assert bad.outcome.kind == kind
    assert says.replace("\\", "") in bad.outcome.message


def test_a_service_that_is_not_there():
    class Nowhere:
        url = "http://127.0.0.1:9"

    (record,) = ask(Nowhere, [BenchRequest("a", 4)])
    assert record.outcome.kind == "connection"


def test_a_url_that_is_none():
    with pytest.raises(ConfigError, match="give http://HOST:PORT"):
        OpenAIClient("localhost:8000")


def holds_once(is_so: Callable[[], bool]) -> bool:
    """Of what a busy machine may delay by itself, in one of a few tries."""
    return any(is_so() for _ in range(10))


def test_a_stall_delays_all_that_was_due_meanwhile(service):
    """With one at a time the others cannot even be sent: from the sending they look fast, from their time they are
    not (coordinated omission)."""
    asked = [BenchRequest("STALL", 2), *[BenchRequest("a", 2)] * 4]

    def others_look_fast() -> bool:
        figures = Figures(ask(service, asked, times=[0.0, 0.01, 0.02, 0.03, 0.04], concurrency=1))
        latencies = figures.latencies_ms()
        assert (latencies["ttft"] > 1e3 * (STALL_S - 0.05)).all()
        assert figures.to_dict()["max_concurrent_requests"] == 1
        assert figures.to_dict()["max_sent_late_ms"] > 1e3 * (STALL_S - 0.05)
        return bool((latencies["ttft_from_sent"][1:] < 1e3 * STALL_S / 2).all())

    assert holds_once(others_look_fast)


def test_so_many_at_once(service):
    def each_was_due_when_a_place_was_free() -> bool:
        figures = Figures(ask(service, [BenchRequest("a", 3)] * 20, concurrency=4))
        assert figures.to_dict()["max_concurrent_requests"] == 4
        return figures.to_dict()["max_sent_late_ms"] < 50

    assert holds_once(each_was_due_when_a_place_was_free)
