"""Speculative decoding on a GPU, by graphs and without: the tokens are those without drafts."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "worker"))  # the requests, the processors and the drafts

from adjusted_model import Arithmetic
from adjusted_requests import EOS, PROCESSORS, VOCAB_SIZE, Asked, expected, some_requests
from drafted_rows import MAX_TOKENS, SPECULATIVE, guess, write
from engine import generate, make_core, tokens
from reference import differences, load
from scripted_drafts import ScriptedDrafts
from step_driver import make_config, start
from tiny_checkpoints import hf_model

from ringcore import LLM, SamplingParams
from ringcore.worker.worker import Worker

pytestmark = pytest.mark.timeout(300)

SUFFIX = {"method": "scripted_drafts:FreeSuffix", "min_match": 2}
OPTIONS = {
    "device": "cuda",
    "max_model_len": 2048,
    "kv_cache_bytes": 1 << 30,
    "dtype": "float32",
    "executor": "uniproc",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, the transformers model, on the CPU)"""
    folder = tmp_path_factory.mktemp("llama")
    model = hf_model("Llama").float().eval()
    model.save_pretrained(folder)
    return str(folder), model


@pytest.fixture(scope="module", params=[False, True], ids=["graphs", "eager"])
def worker(request, tiny):
    options = {"device": "cuda", "block_size": 16, "max_num_seqs": 14, "logits_processors": PROCESSORS}
    config = make_config(tiny[0], enforce_eager=request.param, speculative=SPECULATIVE, **options)
    worker = start(Worker(config, 0, None), num_blocks=1 + 14 * MAX_TOKENS // 16)
    worker._runner.adjustments.grammars = Arithmetic(EOS, VOCAB_SIZE)
    yield worker
    worker.shutdown()


@pytest.mark.parametrize("chance", [0.0, 0.6, 1.0])
def test_every_row_writes_what_it_would_alone(worker, tiny, monkeypatch, chance):
    """chance: that a draft is right. Two steps at once, of which some are launched ahead."""
    for seed in range(3):
        rng = random.Random(seed)
        requests = some_requests(rng)
        due = [(asked, [*asked.prompt, *expected(tiny[1], asked)]) for asked in requests]
        monkeypatch.setattr(ScriptedDrafts, "script", staticmethod(guess([whole for _, whole in due], chance, rng)))
        monkeypatch.setattr(ScriptedDrafts, "may_propose", lambda *_, rng=rng: rng.random() < 0.7)
        _, num_drafts = write(worker, requests, rng)
        assert num_drafts > 0
        for asked, whole in due:
            assert asked.written == whole[len(asked.prompt) :], asked.params
    assert not worker._runner.adjustments.is_adjusted.any()


def test_right_drafts_are_all_accepted_and_wrong_ones_none(worker, tiny, monkeypatch):
    asked = Asked([5, 9, 30], SamplingParams(temperature=0.9, logprobs=3, max_tokens=None), seed=8)
    whole = [*asked.prompt, *expected(tiny[1], asked)]
    found = {}
    for chance in (1.0, 0.0):
        one, found[chance] = Asked(asked.prompt, asked.params, seed=8), []
        monkeypatch.setattr(ScriptedDrafts, "script", staticmethod(guess([whole], chance, random.Random(1))))
        num_gained, num_drafts = write(worker, [one], random.Random(2), found[chance])
        assert one.written == whole[3:]
        assert num_drafts > 0
        assert len(found[chance]) == num_gained
    for right, wrong in zip(*found.values(), strict=False):
        assert right.token_ids == wrong.token_ids
        assert right.logprobs == pytest.approx(wrong.logprobs, abs=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# The whole engine, with suffix drafts, two steps in flight.

PARAMS = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.05},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "frequency_penalty": 0.1, "logprobs": 2},
]


@pytest.fixture(scope="module")
def speculating(smollm2):
    with make_core(smollm2, speculative=SUFFIX, **OPTIONS) as engine:
        yield engine


@pytest.mark.real_model
def test_greedy_tokens_are_the_reference(speculating):
    entries = [one for one in load("smollm2-135m-lengths") if len(one.prompt_token_ids) <= 300]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
    for salt in ("first", "first"):  # the second time from what the first wrote
        outputs = generate(speculating, [entry.prompt_token_ids for entry in entries], params, salt=salt)
        assert differences(entries, tokens(outputs)) == []
    drafts = speculating.step_metrics().drafts
    assert drafts.num_accepted_tokens > 20


@pytest.mark.real_model
def test_tokens_are_those_without_drafts(smollm2, speculating):
    prompts = [[*range(100 + i, 130 + i)] * 3 for i in range(8)]
    params = [
        SamplingParams(**PARAMS[i % len(PARAMS)], seed=i, max_tokens=48, ignore_eos=True) for i in range(len(prompts))
    ]
    with make_core(smollm2, **OPTIONS) as plain:
        due = tokens(generate(plain, prompts, params))
    assert tokens(generate(speculating, prompts, params, salt="together")) == due
    short = OPTIONS | {"num_blocks_override": 40, "max_model_len": 256, "max_num_batched_tokens": 64}
    with make_core(smollm2, speculative=SUFFIX, **short) as engine:
        assert tokens(generate(engine, prompts, params)) == due
        assert engine.stats().num_preemptions > 0
        assert engine.stats().num_free_blocks == 39


@pytest.mark.real_model
def test_aborts_amid_drafts_leave_the_others_alone(speculating):
    free = speculating.stats().num_free_blocks
    prompt = [*range(200, 240)] * 3
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (due,) = tokens(generate(speculating, [prompt], params, salt="alone"))
    from ringcore.protocol.requests import EngineCoreRequest

    for i in range(12):
        speculating.add_request(EngineCoreRequest(f"abort {i}", prompt, params, 0.0, cache_salt=f"{i}"))
    written, num_steps = {}, 0
    while speculating.has_unfinished:
        num_steps += 1
        if num_steps in (3, 5, 8):
            speculating.abort([f"abort {num_steps}"])
        for output in speculating.step().outputs:
            written.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert all(written[f"abort {i}"] == due for i in range(12) if i not in (3, 5, 8))
    assert speculating.stats().num_free_blocks == free


@pytest.mark.real_model
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_two_ranks_draft_alike(smollm2):
    prompts = [[*range(100 + i, 130 + i)] * 3 for i in range(4)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    options = OPTIONS | {"tensor_parallel_size": 2, "executor": "multiproc"}
    found = []
    for speculative in (None, {"method": "suffix", "min_match": 2}):
        with LLM(smollm2, speculative=speculative, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]
