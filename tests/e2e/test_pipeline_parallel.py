"""Stages of layers give the tokens of one stage and of transformers, whatever happens to them."""

from __future__ import annotations

import os
import re
import signal
from itertools import count

import pytest
from engine import generate, make_core, tokens
from new_weights import OtherWeights
from reference import greedy_tokens, load

from ringcore import LLM, SamplingParams
from ringcore.errors import ConfigError, EngineDeadError, InvalidRequestError

pytestmark = pytest.mark.timeout(300)

# So few blocks that requests are preempted, so few tokens a step that long prompts are several chunks.
OPTIONS = {
    "dtype": "float32",
    "block_size": 16,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "num_blocks_override": 20,
}
PROMPTS = [[3 + (7 * i + j * j) % 300 for j in range(n)] for i, n in enumerate([1, 5, 16, 17, 40, 130])]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
PARAMS = [
    SamplingParams(temperature=0.9, top_p=0.95, seed=77, max_tokens=16, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True),  # the engine draws the seed
    SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, seed=3, max_tokens=16, min_tokens=8, allowed_token_ids=[*range(2, 60)]),
    SamplingParams(temperature=0, max_tokens=16, bad_words=["x"], stop_token_ids=[202]),
    SamplingParams(temperature=0.8, seed=5, max_tokens=16, logit_bias={9: 4.0, 33: -4.0}, logprobs=0),
]


def words_of(params: SamplingParams) -> list[list[int]]:
    """For a row whose next mask depends on its tokens: pairs that greedy decoding would generate."""
    return [[first, second] for first in range(2, 60) for second in (first, first + 1)] if params.bad_words else []


def answers(core) -> tuple[list, list[float]]:
    """Tokens, which of them have log-probabilities, and ends; and the log-probabilities."""
    outputs = generate(core, PROMPTS, PARAMS, bad_words=words_of)
    found, values = [], []
    for one in outputs:
        entries = [entry for output in one for entry in output.logprobs or []]
        values += [value for entry in entries for value in entry.logprobs]
        logprobs = [(entry.token_ids, entry.ranks) for entry in entries]
        prompt = next((output.prompt_logprobs for output in one if output.prompt_logprobs is not None), None)
        ends = [(output.finish_reason, output.stop_reason) for output in one if output.finish_reason]
        found.append((logprobs, None if prompt is None else (prompt.token_ids.tolist(), prompt.ranks.tolist()), ends))
    return [tokens(outputs), found], values


@pytest.fixture(scope="module")
def expected(tiny_qwen2):
    return greedy_tokens(tiny_qwen2, PROMPTS, 16)


@pytest.fixture(scope="module")
def of_one_stage(tiny_qwen2):
    with make_core(tiny_qwen2, executor="uniproc", enable_sleep_mode=True, **OPTIONS) as core:
        return answers(core)


def killing(core, name: str, at: int) -> None:
    """The engine's step number `at` from now on begins with the death of a worker."""
    step, num_steps = core.step, count(1)

    def stepped():
        if next(num_steps) == at:
            os.kill(core.ready.pids[name], signal.SIGKILL)
        return step()

    core.step = stepped


def test_two_stages(tiny_qwen2, expected, of_one_stage):
    """One engine, at depth three: with preemptions, chunks and a warm prefix cache; asleep and awake; with other
    weights; and each of its stages dies, the second time for good."""
    options = {"pipeline_parallel_size": 2, "enable_sleep_mode": True, "max_worker_restarts": 1} | OPTIONS
    with make_core(tiny_qwen2, **options) as core:
        assert core.config.scheduler.max_steps_in_flight == 3
        sizes = [table["weights_bytes"] for table in core.ready.memory_bytes]
        table_bytes = 320 * 64 * 4
        assert sum(sizes) < 1.3 * (sizes[0] - table_bytes) * 2 + table_bytes, "a stage has the layers of both"
        found, values = answers(core)
        assert found == of_one_stage[0]
        assert values == pytest.approx(of_one_stage[1], abs=1e-4)
        for _ in range(2):
            assert tokens(generate(core, PROMPTS, GREEDY)) == expected
        assert core.stats().num_preemptions > 0
        assert core.stats().num_prefix_hit_tokens > 0
        _sleeps_and_changes(core, tiny_qwen2, expected)
        killing(core, "worker 0", 7)
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected
        assert (core.num_restarts, core.health().state) == (1, "ready")
        killing(core, "worker 1", 5)
        with pytest.raises(EngineDeadError, match="worker 1") as error:
            generate(core, PROMPTS, GREEDY)
        assert error.value.details["process"] == "worker 1"


def _sleeps_and_changes(core, folder: str, expected: list[list[int]]) -> None:
    for level in (1, 2):
        assert len(core.sleep(level).ranks) == 2
        core.wake_up()
        if level == 1:
            assert tokens(generate(core, PROMPTS, GREEDY)) == expected
    other = OtherWeights(folder)
    core.start_weight_update()
    *chunks, last = other.chunks(3)
    for chunk in chunks:
        core.update_weights(chunk)
    with pytest.raises(InvalidRequestError, match="has no place in the model"):
        core.update_weights({"model.layers.9.mlp.up_proj.weight": last.popitem()[1]})
    core.start_weight_update()
    for chunk in other.chunks(3):
        core.update_weights(chunk)
    core.finish_weight_update()
    for prompt, token_ids in zip(PROMPTS, tokens(generate(core, PROMPTS, GREEDY)), strict=True):
        other.check_greedy(prompt, token_ids)
    core.reload_weights(folder)


@pytest.mark.long_form
def test_two_stages_of_two_ranks(tiny_qwen2, expected):
    """Worker 2 is the first of the last stage, which returns the tokens."""
    with make_core(tiny_qwen2, pipeline_parallel_size=2, tensor_parallel_size=2, **OPTIONS) as core:
        assert core.config.parallel.layout.output_rank == 2
        assert tokens(generate(core, PROMPTS, GREEDY)) == expected
        assert core.stats().num_preemptions > 0


def test_more_stages_than_layers(tiny_qwen2):
    with pytest.raises(ConfigError, match="pipeline_parallel_size=5: the model has 4 layers") as error:
        make_core(tiny_qwen2, pipeline_parallel_size=5, **OPTIONS)
    assert error.value.details["option"] == "pipeline_parallel_size"


def test_no_stages_in_one_process(tiny_qwen2):
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: the uniproc executor has one worker"):
        make_core(tiny_qwen2, pipeline_parallel_size=2, executor="uniproc", **OPTIONS)


@pytest.mark.real_model
@pytest.mark.long_form
def test_a_real_model_through_the_front_door(smollm2):
    """Its embedding is its head: both stages have it. Answers by an expression, and a stop string."""
    pytest.importorskip("llguidance")
    from ringcore.params.structured_outputs import StructuredOutputsParams

    entries = [entry for entry in load("smollm2-135m-lengths") if len(entry.prompt_token_ids) in (5, 17, 33, 64)]
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    regex = r"(yes|no), [a-z]{3,6}\. \d{4}"
    with LLM(smollm2, pipeline_parallel_size=2, dtype="float32", max_model_len=256, kv_cache_bytes=1 << 26) as llm:
        outputs = llm.generate([entry.prompt_token_ids for entry in entries], greedy, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == [entry.token_ids for entry in entries]
        by_regex = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=regex))
        stopped = SamplingParams(temperature=0, max_tokens=40, stop=["."])
        answer, text = llm.generate(["Is it? When?", "The capital of France is"], [by_regex, stopped], use_tqdm=False)
        assert re.fullmatch(regex, answer.outputs[0].text)
        assert text.outputs[0].finish_reason == "stop"
        assert "." not in text.outputs[0].text
