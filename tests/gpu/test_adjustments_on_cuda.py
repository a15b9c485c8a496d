"""Rows with adjusted logits on a GPU, by graphs and without: the tokens that plain loops over one row's logits find."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "worker"))  # the requests, and the processors

from adjusted_model import Arithmetic
from adjusted_requests import EOS, PROCESSORS, Driver, expected, some_requests
from step_driver import admit, decode, make_config, run, start
from tiny_checkpoints import VOCAB_SIZE, hf_model

from ringcore.params.sampling_params import SamplingParams
from ringcore.worker.logits.row_adjustments import RowAdjustments
from ringcore.worker.worker import Worker

pytestmark = pytest.mark.timeout(300)

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 90, 28, 7, 55]
ADJUSTED = SamplingParams(
    temperature=0.8, repetition_penalty=1.3, logit_bias={5: 2.0}, allowed_token_ids=[*range(2, 90)], max_tokens=None
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, the transformers model, on the CPU)"""
    folder = tmp_path_factory.mktemp("llama")
    model = hf_model("Llama").float().eval()
    model.save_pretrained(folder)
    return str(folder), model


@pytest.fixture(params=[False, True], ids=["graphs", "eager"])
def worker(request, tiny):
    options = {"device": "cuda", "block_size": 16, "max_num_seqs": 5, "logits_processors": PROCESSORS}
    worker = start(Worker(make_config(tiny[0], enforce_eager=request.param, **options), 0, None))
    worker._runner.adjustments.grammars = Arithmetic(EOS, VOCAB_SIZE)
    yield worker
    worker.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_every_row_writes_what_it_would_alone(worker, tiny, depth):
    for seed in range(4):
        rng = random.Random(10 * seed + depth)
        requests = some_requests(rng)
        Driver(worker, requests, depth, rng).run()
        for asked in requests:
            assert asked.written == expected(tiny[1], asked), asked.params
        worker.reset_rows()
    assert not worker._runner.adjustments.is_adjusted.any()


def test_steps_that_know_their_tokens_by_themselves_wait_for_nothing(worker, monkeypatch):
    """Penalties, biases and masks that stay: each call for the device is one that may be made under a capture."""
    run(worker, {0: 15, 1: 15}, new=[admit(0, PROMPT, [1, 2], params=ADJUSTED), admit(1, PROMPT, [3, 4])])
    decode(worker, [0, 1], 2)
    checked = []

    def watched(name):
        real = getattr(RowAdjustments, name)

        def call(self, *args):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return real(self, *args)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                checked.append(name)

        return call

    for name in ("admit", "adjust", "count"):
        monkeypatch.setattr(RowAdjustments, name, watched(name))
    run(worker, {0: 1, 1: 1, 2: 15}, new=[admit(2, PROMPT, [5, 6], params=ADJUSTED)])
    decode(worker, [2, 0, 1], 2)
    assert set(checked) == {"admit", "adjust", "count"}


@pytest.mark.parametrize("chunks", [[15], [6, 9], [14, 1]])
def test_log_probabilities_of_a_prompt(worker, tiny, chunks):
    params = SamplingParams(temperature=0, max_tokens=None, prompt_logprobs=3)
    outputs = [run(worker, {2: chunks[0]}, new=[admit(2, PROMPT, [1, 2], params=params)])]
    outputs += [run(worker, {2: count}) for count in chunks[1:]]
    (found,) = outputs[-1].prompt_logprobs
    with torch.inference_mode():
        expected_logprobs = tiny[1](torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    ids = torch.from_numpy(found.token_ids.copy()).long().view(len(PROMPT) - 1, 4)
    assert ids[:, 0].tolist() == PROMPT[1:]
    assert ids[:, 1:].tolist() == expected_logprobs.topk(3).indices.tolist()
    logprobs = torch.from_numpy(found.logprobs.copy()).view(len(PROMPT) - 1, 4)
    torch.testing.assert_close(logprobs, expected_logprobs.gather(1, ids), atol=1e-3, rtol=0)


def test_a_row_whose_every_token_is_barred_ends_alone(worker):
    barred = SamplingParams(temperature=0, max_tokens=None, allowed_token_ids=[7])
    new = [admit(0, PROMPT, [1, 2], params=barred, bad_words=[[7]]), admit(1, PROMPT, [3, 4])]
    output = run(worker, {0: 15, 1: 15}, new=new)
    assert [(error.row, "no token is left" in error.message) for error in output.row_errors] == [(0, True)]
    assert output.rows.tolist() == [1]
