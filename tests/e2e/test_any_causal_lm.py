"""Models without a class here, through the whole engine in float32: the tokens of transformers.

A sample of types by default. `pytest tests/e2e/test_any_causal_lm.py --all-types --seen FILE` runs all of them, which
takes an hour on two cores, and notes what came of each for the page of models; `-k "olmo2 or mamba"` runs some.
"""

from __future__ import annotations

import pytest
from against_transformers import GREEDY, assert_equal, refusal
from engine import generate, make_core, tokens
from reference import differences, load
from transformers_models import MODELS, NEW_TOKENS, PROMPTS, saved, write_config

from ringcore import SamplingParams
from ringcore.errors import CapacityError, ModelLoadError

OPTIONS = {
    "executor": "uniproc",
    "device": "cpu",  # blocks of 4 tokens are too small for a GPU
    "dtype": "float32",
    "model_impl": "transformers",
    "max_model_len": 96,
    "block_size": 4,
    "kv_cache_bytes": 1 << 24,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 16,
}
LENGTHS = tuple(map(len, PROMPTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def model(model_type, folder, all_types):
    if all_types and refusal(model_type, folder, **OPTIONS):
        pytest.skip("refused")
    return saved(model_type, folder, (*LENGTHS, 100, 200) if all_types else LENGTHS)


@pytest.fixture
def options(all_types):
    return OPTIONS | ({"max_model_len": 256} if all_types else {})


@pytest.mark.types("mamba", "bloom")
def test_a_type_is_served_or_refused_by_name_as_the_list_of_types_says(model_type, folder, all_types, note):
    from ringcore.model_executor.models.transformers.known_types import known_type

    error, listed = refusal(model_type, folder, **OPTIONS), known_type(model_type)
    if not listed.reason.startswith("transformers cannot build it"):  # by default; a tiny one it may
        assert (listed.model_impl == "refused") == bool(error), (error, listed)
    assert all_types or error
    assert not error or error.startswith((f"{model_type}: ", f"{model_type}/config.json: "))
    note(refused=error)


@pytest.mark.types(*MODELS)
def test_tokens_are_those_of_transformers_in_chunks_two_steps_deep_cold_and_warm(model, options, note):
    note(one_rank="failed", error=None, control=None)
    with make_core(model.path, steps_in_flight=2, **options) as core:
        note(one_rank="equal", **assert_equal(model, core))


@pytest.mark.long_form  # in one process, by threads, tests/model_executor has others
@pytest.mark.types("qwen3_moe", "gemma3n_text")
def test_two_ranks_give_the_tokens_of_transformers(model, options, all_types, note):
    if not model.has_plan:
        pytest.skip("no plan")
    note(two_ranks="failed")
    try:
        core = make_core(model.path, tensor_parallel_size=2, **options | {"executor": "multiproc"})
    except ModelLoadError as error:
        note(two_ranks=f"refused: {error.details.get('reason') or error}")
        if not all_types:
            raise
        return
    with core:
        outputs = generate(core, [entry.prompt_token_ids for entry in model.entries], GREEDY)
    assert differences(model.entries, tokens(outputs)) == []
    note(two_ranks="equal")


@pytest.mark.types("deepseek_v3", "mixtral", "gemma4_text")
def test_preempted_requests_have_the_same_tokens(model, note):
    note(preempted="failed")
    # Those of one token grow until they are preempted, also where a window keeps all requests short.
    entries = model.entries[: len(PROMPTS)] + model.entries[:1] * 6
    few = OPTIONS | {"max_model_len": 48}
    with pytest.raises(CapacityError) as too_few:
        make_core(model.path, num_blocks_override=2, **few)
    num_blocks = too_few.value.details["num_blocks_override"] + 1  # the longest request takes all of them but one
    with make_core(model.path, num_blocks_override=num_blocks, **few) as core:
        outputs = generate(core, [entry.prompt_token_ids for entry in entries], GREEDY)
        assert differences(entries, tokens(outputs)) == []
        assert core.stats().num_preemptions > 0
    note(preempted="equal")


def test_asleep_and_awake_again(folder):
    model = saved("olmo2", folder)
    with make_core(model.path, enable_sleep_mode=True, **OPTIONS) as core:
        assert core.ready.model is not None
        assert core.ready.model.fused == {"layers": 3, "attentions": 3, "mlps": 3, "norms": 13}
        core.sleep()
        core.wake_up()
        assert differences(model.entries, tokens(generate(core, PROMPTS, GREEDY))) == []


def test_latents_are_cached_expanded_in_long_chunks_updated_and_asleep(tmp_path):
    """Of these sizes chunks of 11 tokens and more are expanded, and a token takes 40 numbers a layer instead of 160."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
    model = saved("deepseek_v3", tmp_path, **sizes)
    with make_core(model.path, steps_in_flight=2, enable_sleep_mode=True, **OPTIONS) as core:
        assert core.ready.model is not None
        assert core.ready.model.fused["attentions"] == core.ready.model.num_layers
        assert core.ready.kv_cache_token_bytes == core.ready.model.num_layers * (32 + 8) * 4
        assert_equal(model, core)
        core.sleep()
        core.wake_up()
        assert differences(model.entries, tokens(generate(core, PROMPTS, GREEDY))) == []
        core.sleep(2)  # without the weights, which are then read into the same memory
        core.wake_up()
        core.reload_weights(model.path)
        assert differences(model.entries, tokens(generate(core, PROMPTS, GREEDY))) == []


def test_random_weights_need_only_the_configuration(tmp_path):
    path = write_config("qwen3_moe", tmp_path)
    with make_core(path, load_format="dummy", **OPTIONS | {"model_impl": "auto"}) as core:
        assert [len(one) for one in tokens(generate(core, PROMPTS, GREEDY))] == [NEW_TOKENS] * len(PROMPTS)


@pytest.mark.long_form  # of tiny models, the tests above
@pytest.mark.real_model
def test_a_native_family_by_transformers_gives_its_reference(smollm2):
    entries = load("smollm2-135m-lengths")[:4]
    prompts = [entry.prompt_token_ids for entry in entries]
    greedy = SamplingParams(temperature=0, max_tokens=len(entries[0].token_ids), ignore_eos=True)
    options = OPTIONS | {"block_size": 16, "max_model_len": 128, "kv_cache_bytes": 1 << 26}
    with make_core(smollm2, **options) as core:
        assert differences(entries, tokens(generate(core, prompts, greedy))) == []
