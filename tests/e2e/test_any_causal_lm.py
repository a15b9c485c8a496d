"""Models without a class here, through the whole engine in float32: the tokens of transformers."""

from __future__ import annotations

import pytest
from engine import generate, make_core, tokens
from reference import differences, load
from transformers_models import MODELS, NEW_TOKENS, PROMPTS, config_of, saved

from ringcore import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
OPTIONS = {
    "device": "cpu",  # blocks of 4 tokens are too small for a GPU
    "dtype": "float32",
    "model_impl": "transformers",
    "max_model_len": 96,
    "block_size": 4,
    "kv_cache_bytes": 1 << 24,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 16,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("model_type", MODELS)
def test_tokens_are_those_of_transformers_in_chunks_two_steps_deep_cold_and_warm(model_type, folder):
    path, entries = saved(model_type, folder)
    assert sum(entry.num_decisive for entry in entries) > 0.8 * NEW_TOKENS * len(PROMPTS)
    with make_core(path, executor="uniproc", steps_in_flight=2, **OPTIONS) as core:
        cold = tokens(generate(core, PROMPTS, GREEDY))
        warm = tokens(generate(core, PROMPTS, GREEDY))
    assert differences(entries, cold) == []
    assert differences(entries, warm) == []


@pytest.mark.parametrize("model_type", ["olmo2", "qwen3_moe"])
def test_two_ranks_give_the_tokens_of_transformers(model_type, folder):
    path, entries = saved(model_type, folder)
    with make_core(path, tensor_parallel_size=2, **OPTIONS) as core:
        assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == []


@pytest.mark.parametrize("model_type", ["deepseek_v3", "mixtral"])
def test_preempted_requests_have_the_same_tokens(model_type, folder):
    path, entries = saved(model_type, folder)
    few = OPTIONS | {"num_blocks_override": 14, "max_model_len": 48}  # the longest request takes 12 of them
    with make_core(path, executor="uniproc", **few) as core:
        assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == []
        assert core.stats().num_preemptions > 0


def test_asleep_and_awake_again(folder):
    path, entries = saved("olmo2", folder)
    with make_core(path, executor="uniproc", enable_sleep_mode=True, **OPTIONS) as core:
        assert core.ready.model is not None
        assert core.ready.model.fused == {"layers": 3, "attentions": 3, "mlps": 3, "norms": 13}
        core.sleep()
        core.wake_up()
        assert differences(entries, tokens(generate(core, PROMPTS, GREEDY))) == []


def test_random_weights_need_only_the_configuration(tmp_path):
    config_of("qwen3_moe", architectures=["Qwen3MoeForCausalLM"]).save_pretrained(tmp_path)
    with make_core(str(tmp_path), executor="uniproc", load_format="dummy", **OPTIONS | {"model_impl": "auto"}) as core:
        assert [len(one) for one in tokens(generate(core, PROMPTS, GREEDY))] == [NEW_TOKENS] * len(PROMPTS)


@pytest.mark.real_model
def test_a_native_family_by_transformers_gives_its_reference(smollm2):
    entries = load("smollm2-135m-lengths")[:4]
    prompts = [entry.prompt_token_ids for entry in entries]
    greedy = SamplingParams(temperature=0, max_tokens=len(entries[0].token_ids), ignore_eos=True)
    with make_core(
        smollm2, executor="uniproc", **OPTIONS | {"block_size": 16, "max_model_len": 128, "kv_cache_bytes": 1 << 26}
    ) as core:
        assert differences(entries, tokens(generate(core, prompts, greedy))) == []
