"""EAGLE-3 heads on a GPU, by graphs and without: drafts are those of plain torch, tokens those without drafts."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "worker"))  # the requests, the processors and the drafts

from adjusted_model import Arithmetic
from adjusted_requests import EOS, PROCESSORS, VOCAB_SIZE, expected, some_requests
from drafted_rows import MAX_TOKENS, write
from engine import generate, make_core, tokens
from head_rows import compare_drafts
from rows_behind import MAX_LEN, check_few_blocks, check_many_counts, check_other_owners, check_prompts_between
from step_driver import make_config, start
from tiny_checkpoints import hf_model
from tiny_heads import HIDDEN, VOCAB, constant_head, write_head

from ringcore import SamplingParams
from ringcore.worker.drafts.drafts_behind import DraftsBehind
from ringcore.worker.runner.head_graphs import HeadGraphs
from ringcore.worker.worker import Worker

pytestmark = pytest.mark.timeout(300)

FREE = "scripted_drafts:FreeHead"
OPTIONS = {"device": "cuda", "max_model_len": 96, "kv_cache_bytes": 1 << 28, "dtype": "float32", "executor": "uniproc"}
FORCED = [
    {"temperature": 0, "logit_bias": {5: 100.0}},  # writes it alone: its drafts are right
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.3},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, the transformers model, on the CPU)"""
    folder = tmp_path_factory.mktemp("llama")
    model = hf_model("Llama", vocab_size=VOCAB, hidden_size=HIDDEN, num_hidden_layers=3).float().eval()
    model.save_pretrained(folder)
    return str(folder), model


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def worker(request, tiny, tmp_path_factory):
    options = {"device": "cuda", "block_size": 16, "max_num_seqs": 14, "logits_processors": PROCESSORS}
    options["max_model_len"] = MAX_LEN
    speculative = {"method": FREE, "model": write_head(tmp_path_factory.mktemp("head"))}
    config = make_config(tiny[0], enforce_eager=request.param, speculative=speculative, **options)
    worker = start(Worker(config, 0, None), num_blocks=1 + 14 * MAX_TOKENS // 16)
    worker._runner.adjustments.grammars = Arithmetic(EOS, VOCAB_SIZE)
    yield worker
    worker.shutdown()


def test_every_row_writes_what_it_would_alone(worker, tiny, monkeypatch):
    """Two steps at once, of which some are launched ahead."""
    seen = compare_drafts(worker, tiny[1], monkeypatch)
    for seed in range(3):
        rng = random.Random(seed)
        requests = some_requests(rng)
        due = [expected(tiny[1], asked) for asked in requests]
        _, num_drafts = write(worker, requests, rng)
        assert num_drafts > 0
        for asked, written in zip(requests, due, strict=True):
            assert asked.written == written, asked.params
    assert len(seen) > 20


@pytest.mark.parametrize("seed", range(8))
def test_rows_with_any_number_of_right_drafts(worker, tiny, monkeypatch, seed):
    """Drafts that graphs compute behind the step before, by what the device found it to accept."""
    found = check_many_counts(worker, tiny[1], monkeypatch, seed)
    assert any(one.is_behind for one in found) == _is_by_graphs(worker)


@pytest.mark.parametrize("check", [check_few_blocks, check_other_owners, check_prompts_between])
def test_rows_whose_drafts_are_behind(worker, tiny, monkeypatch, check):
    found = check(worker, tiny[1], monkeypatch)
    assert any(one.is_behind for one in found) == _is_by_graphs(worker)


def _is_by_graphs(worker):
    return isinstance(worker._runner._stages.proposer._runs, HeadGraphs)


def test_an_engine_with_a_head_writes_the_same(tiny, tmp_path, monkeypatch):
    """It drafts what some of the requests write, and the others do not; then with few blocks, and after a sleep. Most
    drafts are computed behind the step before."""
    reads, read = [], DraftsBehind.token_ids
    monkeypatch.setattr(DraftsBehind, "token_ids", lambda *given: reads.append(1) or read(*given))
    prompts = [[*range(2 + i, 30 + i)] for i in range(8)]
    params = [
        SamplingParams(**FORCED[i % len(FORCED)], seed=i, max_tokens=48, ignore_eos=True) for i in range(len(prompts))
    ]
    with make_core(tiny[0], **OPTIONS) as plain:
        due = tokens(generate(plain, prompts, params))
    given = {
        "speculative": {"method": FREE, "model": write_head(tmp_path, constant_head(5))},
        "enable_sleep_mode": True,
    }
    with make_core(tiny[0], **given, **OPTIONS) as engine:
        for salt in ("first", "first", "second"):  # the second time with cached prefixes
            assert tokens(generate(engine, prompts, params, salt=salt)) == due
            engine.sleep(1)
            engine.wake_up()
        assert engine.step_metrics().drafts.num_accepted_tokens > 100
        assert len(reads) > 10
    short = OPTIONS | {"num_blocks_override": 24, "max_model_len": 96, "max_num_batched_tokens": 64}
    with make_core(tiny[0], **given, **short) as engine:
        assert tokens(generate(engine, prompts, params)) == due
        assert engine.stats().num_preemptions > 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_two_ranks_draft_alike(tiny, tmp_path):
    prompts = [[*range(2 + i, 30 + i)] for i in range(4)]
    params = [SamplingParams(**FORCED[i], seed=i, max_tokens=48, ignore_eos=True) for i in range(4)]
    speculative = {"method": FREE, "model": write_head(tmp_path, constant_head(5))}
    options = OPTIONS | {"tensor_parallel_size": 2, "executor": "multiproc"}
    found = []
    for given in (None, speculative):
        with make_core(tiny[0], speculative=given, **options) as engine:
            found.append(tokens(generate(engine, prompts, params)))
    assert found[0] == found[1]
