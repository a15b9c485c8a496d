"""Text in, text out, by the front door, on real weights."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from engine import generate, make_core, tokens
from reference import DECISIVE_GAP, differences, load

from ringcore import LLM, SamplingParams
from ringcore.errors import InvalidRequestError

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(300)]

OPTIONS = {"dtype": "float32", "kv_cache_bytes": 1 << 29}
GREEDY = SamplingParams(temperature=0, max_tokens=32)


@pytest.fixture(scope="module")
def llm(smollm2):
    with LLM(smollm2, **OPTIONS) as one:
        yield one


def _answers(llm, entries):
    chats = [[{"role": "user", "content": entry.prompt}] for entry in entries if entry.chat]
    texts = [entry.prompt for entry in entries if not entry.chat]
    answered = iter(llm.chat(chats, GREEDY, use_tqdm=False)), iter(llm.generate(texts, GREEDY, use_tqdm=False))
    return [next(answered[0 if entry.chat else 1]) for entry in entries]


def test_the_reference_texts(llm):
    entries = load("smollm2-135m")
    outputs = _answers(llm, entries)
    assert [output.prompt_token_ids for output in outputs] == [entry.prompt_token_ids for entry in entries]
    assert differences(entries, [output.outputs[0].token_ids for output in outputs]) == []
    for entry, output in zip(entries, outputs, strict=True):
        if min(entry.gaps) >= DECISIVE_GAP:
            assert output.outputs[0].text == entry.text.removesuffix("<|im_end|>")
            ended = entry.token_ids[-1] == 2
            assert output.outputs[0].finish_reason == ("stop" if ended else "length")


def test_the_first_logits_of_the_reference(llm):
    """Log-probabilities of the five best tokens, within a thousandth."""
    path = __file__.replace("e2e/test_llm_real_model.py", "data/smollm2-135m.json")
    with open(path) as file:
        first = json.load(file)["logits0"]
    prompt = load("smollm2-135m")[0].prompt_token_ids
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    (row,) = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].logprobs
    for rank, (token_id, logit) in enumerate(zip(first["top5"], first["val"], strict=True), start=1):
        assert row[token_id].rank == rank
        assert row[token_id].logprob == pytest.approx(logit - first["lse"], abs=1e-3)


def test_a_bad_prompt_leaves_its_neighbours_alone(llm):
    prompts = ["The capital of France is", [], [1, 2, 49152], "x " * 9000, {"promt": "hi"}, "Water boils at"]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    good = llm.generate([prompts[0], prompts[5]], greedy, use_tqdm=False)
    outputs = llm.generate(prompts, greedy, use_tqdm=False, on_error="return")
    assert [output.error is None for output in outputs] == [True, False, False, False, False, True]
    assert "49152" in str(outputs[2].error)
    assert "'prompt'" in str(outputs[4].error)
    assert [outputs[i].outputs[0].token_ids for i in (0, 5)] == [output.outputs[0].token_ids for output in good]
    with pytest.raises(InvalidRequestError, match="prompt 1"):
        llm.generate(prompts, greedy, use_tqdm=False)


def test_stop_string_and_stop_token(llm):
    whole = llm.generate("The capital of France is", GREEDY, use_tqdm=False)[0].outputs[0]
    cut = llm.generate(
        "The capital of France is", SamplingParams(temperature=0, max_tokens=32, stop="answer"), use_tqdm=False
    )[0].outputs[0]
    assert cut.text == whole.text.partition("answer")[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "answer")
    dot = whole.token_ids[1]
    ended = llm.generate(
        "The capital of France is", SamplingParams(temperature=0, max_tokens=32, stop_token_ids=[dot]), use_tqdm=False
    )[0].outputs[0]
    assert (ended.token_ids, ended.stop_reason) == (whole.token_ids[:2], dot)


def test_collective_rpc_reaches_the_worker(llm):
    (stats,) = llm.collective_rpc("stats", timeout=30)
    assert stats["rank"] == 0
    assert stats["num_steps"] > 0
    assert llm.reset_prefix_cache() is True


def test_the_gguf_file_itself(smollm2_gguf, is_long):
    """Its weights are expanded exactly, so the reference is transformers on the float32 folder."""
    entries = load("smollm2-135m-float32")[: 9 if is_long else 5]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with make_core(smollm2_gguf, executor="uniproc", max_model_len=256, **OPTIONS) as core:
        outputs = generate(core, [entry.prompt_token_ids for entry in entries], params)
    assert differences(entries, tokens(outputs)) == []


@pytest.mark.long_form  # tests/cli has it, with weights that say less
def test_the_command(smollm2):
    command = [sys.executable, "-m", "ringcore.cli", "generate", "--model", smollm2, "--json"]
    command += ["--prompt", "The capital of France is", "--max-tokens", "8", "--temperature", "0"]
    done = subprocess.run([*command, "--max-model-len", "256"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["outputs"][0]["text"].startswith(" Paris.")
