"""Engine options: one name each, checked alone and together, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_engine import make_model_folder

from ringcore import EngineConfig
from ringcore.errors import ConfigError, ModelLoadError, UnknownOptionError
from ringcore.executor.uniproc import UniProcExecutor
from ringcore.params.vllm_values import ENGINE_VALUES
from ringcore.protocol.codec import decoder, encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make(folder, **options):
    return EngineConfig.from_options(model=folder, **{"load_format": "dummy"} | options)


def edited(folder, tmp_path, **changes):
    """A copy of the folder's config.json with other values."""
    config = json.loads((Path(folder) / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_every_option_belongs_to_one_part(folder):
    config, options = make(folder), EngineConfig.options()
    for name in options:
        holders = [part for part in EngineConfig.PARTS if hasattr(getattr(config, part), name)]
        assert len(holders) == 1, name
        assert options[name].metadata["option"], f"{name} has no description"


@pytest.mark.parametrize("max_model_len", [None, 32, "auto"])
def test_defaults_survive_the_wire(folder, max_model_len):
    config = make(folder, max_model_len=max_model_len, executor=UniProcExecutor)
    assert decoder(EngineConfig).decode(encoder().encode(config)) == config
    assert config.parallel.executor == "ringcore.executor.uniproc:UniProcExecutor"


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("dtype", "int8"),
        ("load_format", "pickle"),
        ("device", "tpu"),
        ("attention_backend", "magic"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("device_ids", [0, 1]),
        ("device_ids", [-1]),
        ("device_ids", "0"),
        ("executor", "threads"),
        ("block_size", 0),
        ("block_size", True),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 1.5),
        ("tensor_parallel_size", 0),
        ("max_model_len", 0),
        ("max_model_len", "model"),
        ("max_model_len", True),
        ("long_prefill_token_threshold", 0),
        ("scheduling_policy", "lifo"),
        ("preempt_lower_priority", "yes"),
        ("enable_prefix_caching", "false"),
        ("max_skip_ahead", -1),
        ("max_skip_ahead", None),
        ("max_num_batched_tokens", 0),
        ("kv_cache_bytes", 0),
        ("num_blocks_override", 1),
        ("steps_in_flight", 3),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(folder, option, value):
    options = {"load_format": "dummy", option: value}
    with pytest.raises(ConfigError, match=rf"^{option}=.*: give") as caught:
        EngineConfig.from_options(model=folder, **options)
    assert caught.value.details["option"] == option


def test_fp8_kv_is_refused_where_it_was_measured_to_break(folder, tmp_path):
    """The test's folder is a Llama's."""
    for name in ("fp8", "fp8_e4m3"):
        assert make(folder, kv_cache_dtype=name).cache.is_fp8
    assert not make(folder).cache.is_fp8
    qwen2 = edited(folder, tmp_path, architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    assert make(str(qwen2), kv_cache_dtype="auto")
    for model_impl in ("native", "transformers"):
        with pytest.raises(
            ConfigError, match=r"kv_cache_dtype='fp8': .* perplexity of [\d.]+ .* 1.3% more; give 'auto'"
        ):
            make(str(qwen2), kv_cache_dtype="fp8", model_impl=model_impl)


def test_what_max_model_len_may_be_is_said(folder):
    with pytest.raises(ConfigError, match="max_model_len='all': give an integer of at least 1, or 'auto'"):
        make(folder, max_model_len="all")


def test_an_unknown_option_gets_the_nearest(folder):
    with pytest.raises(UnknownOptionError, match="'tensor_paralel_size'; did you mean 'tensor_parallel_size'"):
        make(folder, tensor_paralel_size=2)


def test_more_tokens_than_positions(folder):
    limit = make(folder).model.spec.max_position_embeddings
    assert make(folder, max_model_len=limit).model.context_len == limit
    with pytest.raises(ConfigError, match=f"positions for {limit} tokens; lower it"):
        make(folder, max_model_len=limit + 1)


@pytest.mark.parametrize("max_model_len", [None, "auto"])
def test_the_models_own_length_is_the_upper_bound(folder, max_model_len):
    config = make(folder, max_model_len=max_model_len)
    assert config.model.max_model_len == max_model_len
    assert config.model.context_len == config.model.spec.max_position_embeddings


@pytest.mark.parametrize(
    ("options", "max_tokens_in_flight"),
    [
        ({"steps_in_flight": 2, "max_num_batched_tokens": 100}, 200),
        ({"steps_in_flight": 1, "max_num_batched_tokens": 100}, 100),
        ({"steps_in_flight": 2, "max_num_batched_tokens": 100, "long_prefill_token_threshold": 30}, 60),
        ({"steps_in_flight": 2, "max_num_batched_tokens": 100, "long_prefill_token_threshold": 101}, 200),
        ({"steps_in_flight": 2, "max_num_batched_tokens": 1, "max_num_seqs": 8}, 2),
    ],
)
def test_the_most_tokens_of_one_request_in_flight(folder, options, max_tokens_in_flight):
    assert make(folder, **options).scheduler.max_tokens_in_flight == max_tokens_in_flight


@pytest.mark.parametrize(("device", "num_tokens"), [("cuda", 8192), ("cpu", 512)])
def test_the_device_says_how_many_tokens_a_step_has(folder, device, num_tokens):
    assert make(folder, device=device).scheduler.token_budget == num_tokens
    unknown = make(folder, device="auto")
    assert unknown.scheduler.max_num_batched_tokens is None
    with pytest.raises(AssertionError, match="not known"):
        _ = unknown.scheduler.token_budget
    known = unknown.on_device(device)
    assert known.scheduler.max_num_batched_tokens == known.scheduler.token_budget == num_tokens
    assert known.scheduler.steps_in_flight == 2
    assert (known.scheduler.short_step_s is None) == (device == "cuda")
    assert known.scheduler.max_tokens_in_flight == known.scheduler.steps_in_flight * num_tokens
    assert known.on_device("cpu") == known
    given = make(folder, device=device, max_num_batched_tokens=100)
    assert given.scheduler.token_budget == given.on_device("cpu").scheduler.token_budget == 100
    for option in ({"executor": "uniproc"}, {"speculative": {"method": "suffix"}}):
        assert make(folder, device=device, **option).scheduler.steps_in_flight == (2 if device == "cuda" else 1)
    assert make(folder, device=device, steps_in_flight=2).scheduler.short_step_s is None
    many = make(folder, device=device, max_num_seqs=10_000)
    assert many.scheduler.token_budget == 10_000


def test_preempting_by_priority_needs_priorities(folder):
    scheduler = make(folder, scheduling_policy="priority", preempt_lower_priority=True).scheduler
    assert scheduler.preempt_lower_priority
    assert not make(folder, scheduling_policy="priority").scheduler.preempt_lower_priority
    with pytest.raises(ConfigError, match="'fcfs' has no priorities; give scheduling_policy='priority' too") as caught:
        make(folder, preempt_lower_priority=True)
    assert caught.value.details["option"] == "preempt_lower_priority"


def test_heads_that_do_not_divide(folder, tmp_path):
    other = edited(
        folder,
        tmp_path,
        num_attention_heads=9,
        num_key_value_heads=3,
        hidden_size=144,
        head_dim=16,
        intermediate_size=96,
    )
    assert make(other, tensor_parallel_size=3).parallel.tensor_parallel_size == 3
    with pytest.raises(ConfigError, match=r"9 attention heads do not divide into 2 ranks; give one of \[1, 3"):
        make(other, tensor_parallel_size=2)


def test_uniproc_has_one_rank(folder):
    with pytest.raises(ConfigError, match="uniproc executor has one worker"):
        make(folder, executor="uniproc", tensor_parallel_size=2)


def test_an_unknown_architecture_lists_the_known(folder, tmp_path):
    other = edited(folder, tmp_path, architectures=["BertForMaskedLM"])
    with pytest.raises(ModelLoadError, match=r"BertForMaskedLM.*LlamaForCausalLM.*Qwen2ForCausalLM"):
        make(other, model_impl="native")


def test_a_missing_folder(tmp_path):
    with pytest.raises(ModelLoadError, match="nowhere"):
        EngineConfig.from_options(model=tmp_path / "nowhere")


@pytest.mark.parametrize(("option", "values"), ENGINE_VALUES.items())
def test_values_of_vllms_are_explained(option, values, folder):
    for theirs, ours in values.items():
        with pytest.raises(ConfigError, match=f"^{option}='{theirs}': vLLM's '{theirs}' is {ours} here$"):
            make(folder, **{option: theirs})
        make(folder, **({option: ours.strip("'")} if option != "load_format" else {}))
