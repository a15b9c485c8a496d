"""gpt-oss as it is published, small: MXFP4 experts, sinks, windows in every other layer, clamped gates. Through the
whole engine in float32: the tokens of transformers with the expanded weights."""

from __future__ import annotations

import pytest
from against_transformers import GREEDY, assert_equal
from engine import generate, make_core, tokens
from mxfp4_checkpoints import save_mxfp4
from reference import differences
from transformers_models import PROMPTS, Saved, continued, preceded, random_model, write_config

from ringcore.errors import ConfigError

OPTIONS = {
    "executor": "uniproc",
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 96,
    "block_size": 4,
    "kv_cache_bytes": 1 << 24,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 16,
}
SIZES = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Saved:
    folder = tmp_path_factory.mktemp("gpt_oss")
    hf = random_model(write_config("gpt_oss", folder, **SIZES))
    for layer in hf.model.layers:  # sinks as strong as scores, and gates that reach the limit
        layer.self_attn.sinks.data += 2.0
        layer.mlp.experts.gate_up_proj.data *= 4.0
    save_mxfp4(folder, hf)
    entries = [continued(hf, prompt) for prompt in PROMPTS]
    before = entries[-1].prompt_token_ids[:20]
    return Saved(str(folder), entries, True, [preceded(hf, before, entry) for entry in entries])


def assert_generates(core, model: Saved) -> None:
    outputs = generate(core, [entry.prompt_token_ids for entry in model.entries], GREEDY)
    assert differences(model.entries, tokens(outputs)) == []


def test_tokens_in_chunks_two_steps_deep_cold_and_warm_asleep_and_read_again(model):
    with make_core(model.path, steps_in_flight=2, enable_sleep_mode=True, **OPTIONS) as core:
        assert core.ready.model is not None
        assert core.ready.model.fused["experts"] == core.ready.model.fused["attentions"] == 4
        assert_equal(model, core)
        core.sleep()
        core.wake_up()
        assert_generates(core, model)
        core.sleep(2)  # without the weights
        core.wake_up()
        core.reload_weights(model.path)
        assert_generates(core, model)


@pytest.mark.long_form
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks(model, expert_parallel):
    """The short form has ranks as threads, in tests/model_executor/models/test_mxfp4_experts.py."""
    ranks = OPTIONS | {"executor": "multiproc", "tensor_parallel_size": 2, "expert_parallel": expert_parallel}
    with make_core(model.path, enable_sleep_mode=True, **ranks) as core:
        assert_generates(core, model)
        core.sleep(2)
        core.wake_up()
        core.reload_weights(model.path)
        assert_generates(core, model)


def test_random_weights(model):
    with make_core(model.path, load_format="dummy", **OPTIONS) as core:
        assert len({tuple(one) for one in tokens(generate(core, PROMPTS, GREEDY))}) == len(PROMPTS)


def test_shares_that_cut_a_group_are_refused_before_a_worker_starts(model):
    four = OPTIONS | {"executor": "multiproc", "tensor_parallel_size": 4}
    expected = "share of an expert is 16 of its intermediate size 64, and the mxfp4 scales are of 32 each; give expert_"
    with pytest.raises(ConfigError, match=expected):
        make_core(model.path, **four)
