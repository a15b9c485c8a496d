"""The benchmark of the front end: its workers, its floors, and a whole run on a small model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import front_end
from benchmarks.driver import BenchmarkError
from benchmarks.front_end import Case, FrontEnd, make_cases, token_rows, write_model
from benchmarks.harness import Plan, engine_specs
from benchmarks.made_tokenizer import write_tokenizer
from benchmarks.models import PublishedModel
from benchmarks.peers.front_end_ringcore import measure_alone
from benchmarks.peers.text_executor import PACED_STEP_S, TEXT_FILE, TextWorker
from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.config import EngineConfig
from ringcore.testing.models import tiny_model_config

SMALL = PublishedModel(
    "small", tiny_model_config(bos_token_id=998, eos_token_id=999, max_position_embeddings=front_end.MAX_MODEL_LEN)
)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    folder = SMALL.write(tmp_path / "small")
    write_tokenizer(folder, dict(SMALL.config))
    (folder / "model.safetensors.index.json").write_text("{}")
    return folder


def test_the_model_has_a_text_and_no_weights(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    token_ids = write_model(small, folder)
    assert json.loads((folder / TEXT_FILE).read_text()) == token_ids
    assert len(token_ids) == front_end.TEXT_TOKENS
    assert len(load_tokenizer(folder).decode(token_ids).split()) > 100
    assert not (folder / "model.safetensors.index.json").exists()


def test_every_row_says_the_text_from_a_place_of_its_own(small: Path) -> None:
    text = list(range(1000, 1010))
    (small / TEXT_FILE).write_text(str(text))
    config = EngineConfig.from_options(model=str(small), load_format="dummy", max_num_seqs=4)
    worker = TextWorker(config, 0, None)
    worker._known[:] = (3, 8, 0, 0)
    # Row 1 is 97 tokens further on: at 8 + 97, which is 5 of 10.
    assert worker.next_tokens(np.array([0, 1]), 3).tolist() == [1003, 1004, 1005, 1005, 1006, 1007]


def test_alone_everything_takes_time(small: Path) -> None:
    alone = measure_alone(str(small), load_tokenizer(small).encode("The history of salt is long. " * 20))
    assert alone.keys() == {"encode_us", "decode_us", "write_us", "event_bytes"}
    assert all(value > 0 for value in alone.values())
    assert 200 < alone["event_bytes"] < 300


def test_costs_are_by_token_or_by_request() -> None:
    reply = {"rows": [("output", "tokens/s", 50.0), ("other", "ms", 1.0)], "completion_tokens": 100, "num_events": 25}
    assert token_rows(reply, 1000.0, 200.0, num_requests=4) == [
        ("output", "tokens/s", 50.0),
        ("front end", "µs of CPU a token", 10.0),
        ("engine", "µs of CPU a token", 2.0),
        ("an output has", "tokens", 4.0),
    ]
    assert token_rows(reply, 1000.0, 200.0, num_requests=100) == [
        ("rate", "requests/s", 50.0),
        ("front end", "µs of CPU a request", 10.0),
        ("engine", "µs of CPU a request", 2.0),
    ]


def test_cases() -> None:
    cases = make_cases([1, 64, 1024])
    assert cases[2] == Case(1024, front_end.PACED_TOKENS, "paced")
    assert [case.new_tokens for case in cases[3:6]] == [4096, 512, 128]
    assert [case.shown for case in (cases[0], cases[4], cases[6])] == [
        "1 stream, paced",
        "64 streams, flat out",
        "256 requests of one token",
    ]


@pytest.mark.long_form
def test_a_whole_run(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_end, "EXECUTORS", {"paced": "PacedExecutor"})  # each place starts an engine of each
    monkeypatch.setattr(front_end, "make_cases", lambda sizes: [Case(sizes[0], 3, "paced"), Case(5, 1, "paced")])
    plan = Plan(engine_specs([], "eager"), small, 1, argparse.Namespace(streams="2"))
    findings = FrontEnd().run(plan)
    rows = {f"{one.name}, {one.unit}": one for one in findings.measurements}
    for place in ("AsyncEngine", "service"):
        shown = f"{place}, 2 streams, paced"
        assert 0 < rows[f"{shown}, output, tokens/s"].samples["ringcore"][0] <= 6 / (2 * PACED_STEP_S)
        cost = rows[f"{shown}, front end, µs of CPU a token"]
        assert cost.limit is not None
        assert cost.samples["ringcore"][0] > cost.limit.value > 0
        assert rows[f"{shown}, engine, µs of CPU a token"].samples["ringcore"][0] > 0
        assert 1 <= rows[f"{shown}, an output has, tokens"].samples["ringcore"][0] <= 3
        assert rows[f"{place}, 5 requests of one token, front end, µs of CPU a request"].samples["ringcore"][0] > 0
    assert list(findings.engines) == ["ringcore"]
    assert findings.checks[0].data["decode_us"] > 0


def test_a_peer_has_no_part_in_it(small: Path) -> None:
    specs = engine_specs([], "eager")
    with pytest.raises(BenchmarkError, match="leave it out"):
        FrontEnd().run(Plan([*specs, *specs], small, 1, argparse.Namespace(streams="1")))
