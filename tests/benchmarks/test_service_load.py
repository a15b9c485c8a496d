"""Load on a service: what its clients measure, and whole runs on services whose answers are known."""

from __future__ import annotations

import asyncio
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fake_service import make_server

from benchmarks import models
from benchmarks.driver import ROOT, BenchmarkError
from benchmarks.harness import Plan, engine_specs
from benchmarks.made_tokenizer import write_tokenizer
from benchmarks.models import PublishedModel
from benchmarks.peers.http_streams import Answer, HttpError, read_answer
from benchmarks.peers.load_generator import (
    Load,
    LoadGenerator,
    Play,
    latency_rows,
    play,
    rate_rows,
    saturated_rows,
)
from benchmarks.peers.load_generator import Target as ServiceTarget
from benchmarks.result import Findings
from benchmarks.service_load import ServiceLoad, make_loads, the_same_rate
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.testing.models import tiny_model_config

LIMIT_S = 30.0
SMALL = PublishedModel("small", tiny_model_config(bos_token_id=998, eos_token_id=999))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = make_server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def target(port: int) -> dict[str, object]:
    return {"port": port, "model": "model"}


def loads(*prompts: str, max_tokens: int = 4) -> list[Load]:
    return [Load(prompt=prompt, max_tokens=max_tokens) for prompt in prompts]


# -------------------------------------------------------------------------------------------------------------------
# The clients.


def test_answers_are_read_whatever_way_they_are_cut(port: int) -> None:
    done = asyncio.run(play(ServiceTarget(**target(port)), loads("a", "b"), [0.0, 0.01]))
    answers = [read_answer(events) for events in done.events]
    assert [answer.text for answer in answers] == [" word0 word1 word2 word3"] * 2
    assert [len(answer.text_s) for answer in answers] == [4, 4]  # the event without text is none
    assert [(answer.prompt_tokens, answer.completion_tokens) for answer in answers] == [(7, 4)] * 2
    for answer, due, sent in zip(answers, done.due_s, done.sent_s, strict=True):
        assert due <= sent <= answer.text_s[0]
        assert answer.text_s == sorted(answer.text_s)


def test_a_poisson_load_and_a_closed_one(port: int) -> None:
    generator, asked = LoadGenerator(), loads(*"abcdefgh")
    arrived = generator.arrive(target(port), asked, rate=1000.0, seed=1, limit_s=LIMIT_S)
    assert [name for name, _, _ in arrived["rows"]] == [
        "requests",
        "output",
        "time to first token, p50",
        "time to first token, p99",
        "between tokens, p50",
        "between tokens, p99",
        "whole answer, p50",
        "whole answer, p99",
    ]
    assert (arrived["completion_tokens"], arrived["num_events"], arrived["prompt_tokens"]) == (32, 32, 56)
    saturated = generator.saturate(target(port), asked, concurrency=2, limit_s=LIMIT_S)
    assert [(name, unit) for name, unit, _ in saturated["rows"]] == [("requests", "requests/s"), ("output", "tokens/s")]
    assert all(value > 0 for _, _, value in saturated["rows"])
    assert saturated["texts"] == arrived["texts"]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("status", "status 404: .*no such model"),
        ("cut", "within an answer"),
        ("error", "broke off: .*out of order"),
        ("short", "4 tokens were asked for, 3 came"),
    ],
)
def test_an_answer_that_is_not_whole_is_no_sample(port: int, fault: str, message: str) -> None:
    with pytest.raises(HttpError, match=message):
        LoadGenerator().arrive(target(port), loads("a", f"FAULT-{fault}"), rate=1000.0, seed=1, limit_s=LIMIT_S)


def test_a_service_that_is_not_there(port: int) -> None:
    with pytest.raises(OSError, match="Connect call failed"):
        LoadGenerator().saturate({"port": 1, "model": "model"}, loads("a", "b"), concurrency=1, limit_s=LIMIT_S)


def test_latencies_count_from_the_moment_a_request_was_due() -> None:
    done = Play(due_s=[10.0, 11.0], sent_s=[10.5, 11.0])
    answers = [Answer([11.0, 11.5, 12.5], "", 1, 3), Answer([13.0, 13.25, 13.5], "", 1, 3)]
    assert latency_rows(done, answers) == [
        ("time to first token, p50", "ms", 1500.0),
        ("time to first token, p99", "ms", 2000.0),
        ("between tokens, p50", "ms", 375.0),
        ("between tokens, p99", "ms", 1000.0),
        ("whole answer, p50", "ms", 2500.0),
        ("whole answer, p99", "ms", 2500.0),
    ]
    assert rate_rows(done, answers) == [("requests", "requests/s", 2 / 3.5), ("output", "tokens/s", 6 / 3.5)]


def test_saturation_counts_while_every_place_was_taken() -> None:
    # Two places: the first two end at 2 and 3, and from there to the last sending, at 6, three events come, of one
    # and a half tokens each.
    done = Play(due_s=[0.0, 0.0, 2.0, 6.0], sent_s=[0.0, 0.0, 2.0, 6.0])
    texts_s = [[1.0, 2.0], [1.0, 3.0], [4.0, 5.0], [5.5, 7.0]]
    answers = [Answer(text_s, "", 1, 3) for text_s in texts_s]
    assert saturated_rows(done, answers, 2) == [("requests", "requests/s", 0.5), ("output", "tokens/s", 1.5)]
    with pytest.raises(HttpError, match="4 requests are too few to keep 4 under way"):
        saturated_rows(done, answers, 4)


# -------------------------------------------------------------------------------------------------------------------
# What is asked.


def test_a_made_tokenizer_is_as_large_as_the_model_says(tmp_path: Path) -> None:
    for model in (SMALL, PublishedModel("medium", tiny_model_config(bos_token_id=4999, eos_token_id=4990))):
        folder = model.write(tmp_path)
        write_tokenizer(folder, dict(model.config))
        tokenizer = load_tokenizer(folder)
        assert tokenizer.vocab_size == max(model.config["bos_token_id"], model.config["eos_token_id"]) + 1
        assert tokenizer.eos_token_id == model.config["eos_token_id"]
        text = "The history of salt, 17. Ägypten"
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert len(tokenizer.encode("aq")) == 1  # a merge


def test_requests_are_the_same_at_every_call(tmp_path: Path) -> None:
    folder = SMALL.write(tmp_path)
    write_tokenizer(folder, dict(SMALL.config))
    tokenizer = load_tokenizer(folder)
    asked = make_loads(tokenizer, 40, (20, 30), (3, 5))
    assert make_loads(tokenizer, 10, (20, 30), (3, 5)) == asked[:10]
    assert len({load["prompt"] for load in asked}) == 40
    assert {load["max_tokens"] for load in asked} == {3, 4, 5}
    assert all(18 <= len(tokenizer.encode(load["prompt"])) <= 32 for load in asked)


def test_the_same_rate_is_one_that_the_slower_service_can_take() -> None:
    assert the_same_rate({"ringcore": 10.0, "vllm": 5.0}) == pytest.approx(3.0)


# -------------------------------------------------------------------------------------------------------------------
# Whole runs.


@pytest.fixture
def fake_python(tmp_path: Path) -> str:
    """An interpreter that runs the fake service's child for whatever module, and everything else as it is."""
    file = tmp_path / "python"
    child = Path(__file__).with_name("fake_service_child.py")
    file.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={ROOT}\n[ "$1" = -m ] && exec {sys.executable} {child}\n'
        f'exec {sys.executable} "$@"\n'
    )
    file.chmod(0o755)
    return str(file)


def run(
    python: str, *arguments: str, rounds: int = 1, model: Path = Path("/nowhere"), env: Mapping[str, str] | None = None
) -> Findings:
    """Two fake services, the second with `env`."""
    parser = ArgumentParser()
    ServiceLoad.add_arguments(parser)
    ours, peer = engine_specs(
        [f"vllm={python}"], "eager", [f"vllm:{name}={value}" for name, value in (env or {}).items()]
    )
    ours = replace(ours, command=(python, *ours.command[1:]))
    few = ("--requests", "4", "--saturating-requests", "8", "--concurrency", "2", "--new-tokens", "2-4")
    options = parser.parse_args([*few, *arguments])
    return ServiceLoad().run(Plan([ours, peer], model, rounds, options))


@pytest.mark.long_form
def test_two_services_at_every_level(fake_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "small", SMALL)
    findings = run(fake_python, "--shapes", "small", rounds=2)
    levels = [f"{share}% of its own saturation" for share in (30, 60, 90)] + ["the same rate"]
    names = [one.name for one in findings.measurements]
    assert names[:2] == ["saturation, requests", "saturation, output"]
    assert len(names) == 2 + 8 * len(levels)
    assert [name.split(", ")[0] for name in names[2::8]] == levels
    for one in findings.measurements:
        assert {engine: len(samples) for engine, samples in one.samples.items()} == {"ringcore": 2, "vllm": 2}
    rates = {check.name.rpartition(", ")[2]: check.data for check in findings.checks[:4]}
    assert rates["90% of its own saturation"]["vllm"] == pytest.approx(3 * rates["30% of its own saturation"]["vllm"])
    assert len(set(rates["the same rate"].values())) == 1
    assert rates["the same rate"]["vllm"] == pytest.approx(min(rates["60% of its own saturation"].values()))
    assert not any(check.name.startswith("texts equal") for check in findings.checks)  # of random weights


@pytest.mark.parametrize(("env", "equal"), [({}, "4 of 4"), ({"FAKE_SHIFT": "x"}, "0 of 4")])
def test_texts_of_one_model_are_compared(
    fake_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], equal: str
) -> None:
    folder = SMALL.write(tmp_path)
    write_tokenizer(folder, dict(SMALL.config))
    monkeypatch.setattr("benchmarks.service_load.SHARES", ())
    (check,) = [
        check for check in run(fake_python, model=folder, env=env).checks if check.name.startswith("texts equal")
    ]
    assert (check.name, check.value) == ("texts equal to those of vllm", equal)


def test_a_service_that_does_not_start_is_told_with_its_log(fake_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "small", SMALL)
    with pytest.raises(BenchmarkError, match=r"(?s)vllm raised .*ended with exit code 1 .*no such device"):
        run(fake_python, "--shapes", "small", env={"FAKE_FAULT": "load"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--saturating-requests", "3"], "--saturating-requests 3: give at least twice --concurrency 2"),
        (["--prompt-tokens", "9-3"], "--prompt-tokens 9-3: give two numbers"),
        (["--shapes", "huge"], "no model 'huge'"),
        ([], "--model /nowhere: no such folder"),
    ],
)
def test_a_wrong_option_is_named(fake_python: str, arguments: list[str], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        run(fake_python, *arguments)
