"""Groups and blocks from specs and bytes. Where nothing else is said a page has 4 tokens, 2 * 4 * 8 * 4 = 256 bytes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import num_examples

from ringcore.errors import CapacityError, ConfigError
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    LocalAttentionSpec,
    MLASpec,
    SlidingWindowSpec,
)

PAGE = 256


def full(block_size=4, num_kv_heads=1, head_size=8, dtype="float32") -> FullAttentionSpec:
    return FullAttentionSpec(block_size, num_kv_heads, head_size, dtype)


def sliding(sliding_window, block_size=4, num_kv_heads=1, head_size=8, dtype="float32") -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, num_kv_heads, head_size, dtype, sliding_window)


def latent(kv_lora_rank=12, block_size=4) -> MLASpec:
    """Of 12: as many numbers in a row as a head of `full` has in key and value."""
    return MLASpec(block_size, kv_lora_rank, qk_rope_head_dim=4, dtype="float32")


def model(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"layers.{i}": spec for i, spec in enumerate(specs)}


LAYERS = model(full(), full())
BLOCK_BYTES = 2 * PAGE


def chunked(chunk_size: int, v_head_size: int | None = None) -> ChunkedAttentionSpec:
    return ChunkedAttentionSpec(4, 1, 8, "float32", chunk_size, v_head_size)


F, S = full(), sliding(8)
MIXED = model(S, S, F, S, S, F)


def plan_ranks(
    tables, available_bytes, *, max_model_len=4, fit=False, in_flight=2, num_blocks_override=None, num_stages=1
):
    return plan_kv_cache(
        tables,
        available_bytes,
        max_model_len=max_model_len,
        fit_max_model_len=fit,
        max_tokens_in_flight=in_flight,
        num_blocks_override=num_blocks_override,
        num_stages=num_stages,
    )


def plan(layers, available_bytes=10**9, **options) -> KVCacheConfig:
    return plan_ranks([layers], [available_bytes], **options)


def names(config: KVCacheConfig) -> list[list[int]]:
    """The numbers of the layers, by group."""
    return [[int(name.removeprefix("layers.")) for name in group.layer_names] for group in config.groups]


# Blocks.


def test_blocks_that_the_bytes_hold():
    config = plan(LAYERS, 10 * BLOCK_BYTES + 511, max_model_len=36)
    assert config.num_blocks == 10
    assert [(group.layer_names, group.spec) for group in config.groups] == [(["layers.0", "layers.1"], full())]
    assert config.total_bytes == 10 * BLOCK_BYTES
    assert (config.max_model_len, config.max_tokens_in_flight) == (36, 2)


@pytest.mark.parametrize("layers", [LAYERS, MIXED])
def test_every_rank_has_the_least_of_all(layers):
    assert plan_ranks([layers] * 2, [32 * BLOCK_BYTES, 20 * BLOCK_BYTES], max_model_len=16).num_blocks == 20


# Stages of a pipeline.


def test_the_stage_with_room_for_the_fewest_blocks_sets_their_number():
    """Three layers in one stage, one in the next: the second has less memory, and room for more blocks."""
    layers = model(F, F, F, F)
    first, last = dict(list(layers.items())[:3]), dict(list(layers.items())[3:])
    config = plan_ranks([first, first, last, last], [30 * PAGE, 31 * PAGE, 20 * PAGE, 19 * PAGE], num_stages=2)
    assert config.num_blocks == 10
    assert names(config) == [[0, 1, 2, 3]]
    assert [config.of_layers(stage).block_bytes for stage in (first, last)] == [3 * PAGE, PAGE]
    assert names(config.of_layers(last)) == [[3]]


def test_every_stage_has_its_share_of_every_group():
    """Groups of two of the layers in order, s0 s1, s3 s4, f2 f5, would have two layers of one in the first stage."""
    layers = list(MIXED.items())
    stages = [dict(layers[:3]), dict(layers[3:])]
    config = plan_ranks(stages, [10**9] * 2, max_model_len=64, num_stages=2)
    assert names(config) == [[0, 3], [1, 4], [2, 5]]
    assert [names(config.of_layers(stage)) for stage in stages] == [[[0], [1], [2]], [[3], [4], [5]]]
    assert [config.of_layers(stage).num_tensors for stage in stages] == [1, 1]


def test_a_stage_may_have_no_layer_of_a_group():
    stages = [model(S, S), {"layers.2": F, "layers.3": F}]
    config = plan_ranks(stages, [10**9] * 2, max_model_len=64, num_stages=2)
    assert [names(config.of_layers(stage)) for stage in stages] == [[[0, 1], []], [[], [2, 3]]]
    assert config.of_layers(stages[0]).page_size_bytes == PAGE


def test_ranks_of_a_stage_have_the_same_layers():
    with pytest.raises(ConfigError, match=r"rank 2 has 1 attention layers and rank 3 has 2; they differ in layers\.3"):
        plan_ranks([model(F, F)] * 2 + [{"layers.2": F}, {"layers.2": F, "layers.3": F}], [10**9] * 4, num_stages=2)


def test_errors_name_what_was_decisive():
    """Of four ranks in two stages: two that share a layer, and two stages."""
    odd = [model(F, F)] * 2 + [{"layers.2": F}, {"layers.2": full(num_kv_heads=2)}]
    with pytest.raises(ConfigError, match=r"on rank 2 and .* on rank 3") as raised:
        plan_ranks(odd, [10**9] * 4, num_stages=2)
    assert (raised.value.details["option"], raised.value.details["value"]) == ("tensor_parallel_size", 2)
    with pytest.raises(ConfigError, match="each of the 2 ranks of a stage") as raised:
        plan_ranks([*odd[:3], {"layers.3": F}], [10**9] * 4, num_stages=2)
    assert (raised.value.details["option"], raised.value.details["value"]) == ("tensor_parallel_size", 2)
    with pytest.raises(ConfigError, match="stage 1 of 2 has no attention layer") as raised:
        plan_ranks([model(F, F)] * 2 + [{}, {}], [10**9] * 4, num_stages=2)
    assert (raised.value.details["option"], raised.value.details["value"]) == ("pipeline_parallel_size", 2)


def test_override_wins_over_the_bytes():
    assert plan(LAYERS, 0, max_model_len=8, num_blocks_override=7).num_blocks == 7


@pytest.mark.parametrize("max_model_len", [33, 36])
def test_the_null_block_is_counted(max_model_len):
    plan(LAYERS, 10 * BLOCK_BYTES, max_model_len=max_model_len)
    with pytest.raises(CapacityError):
        plan(LAYERS, 9 * BLOCK_BYTES, max_model_len=max_model_len)


# Too little memory.


def test_too_small_gives_the_numbers_and_what_fits():
    with pytest.raises(CapacityError) as error:
        plan(LAYERS, 10 * BLOCK_BYTES, max_model_len=37)
    assert error.value.details == {
        "needed_bytes": 11 * BLOCK_BYTES,
        "available_bytes": 10 * BLOCK_BYTES,
        "missing_bytes": BLOCK_BYTES,
        "max_model_len": 36,
        "kv_cache_bytes": 11 * BLOCK_BYTES,
        "budget": {},
    }
    assert error.value.message == (
        "KV cache: one request of 37 tokens needs 5632 bytes, 5120 bytes available, 512 bytes missing; "
        "lower max_model_len to 36 or raise kv_cache_bytes to 5632 bytes"
    )
    plan(LAYERS, 10 * BLOCK_BYTES, max_model_len=36)


def test_sizes_of_a_real_model_are_in_gib():
    spec = full(16, 8, 128, "bfloat16")  # 64 KiB a page
    layers = model(*[spec] * 32)  # 2 MiB a block
    with pytest.raises(CapacityError, match=r"needs 4\.00 GiB \(4297064448 bytes\), 2\.50 GiB .* to 20464 or"):
        plan(layers, 5 * 2**29, max_model_len=32768)


@pytest.mark.parametrize("available", [-5, 0, 511, BLOCK_BYTES])
def test_no_length_fits(available):
    with pytest.raises(CapacityError, match="missing; raise kv_cache_bytes") as error:
        plan(LAYERS, available, max_model_len=4)
    assert error.value.details["max_model_len"] == 0


def test_override_too_small():
    with pytest.raises(CapacityError) as error:
        plan(LAYERS, max_model_len=37, num_blocks_override=2)
    assert error.value.message == (
        "KV cache: one request of 37 tokens needs 10 blocks, num_blocks_override=2 has 1 beside the null block, "
        "9 missing; lower max_model_len to 4 or raise num_blocks_override to 11"
    )
    assert error.value.details["num_blocks_override"] == 11
    plan(LAYERS, max_model_len=37, num_blocks_override=11)
    plan(LAYERS, max_model_len=4, num_blocks_override=2)


def test_too_small_for_all_groups_together():
    # 9 tokens: 3 blocks of full attention; in each of the two window groups 8 - 1 + 2 in flight, so 3. One is null.
    plan(MIXED, 10 * BLOCK_BYTES, max_model_len=9)
    with pytest.raises(CapacityError, match=r"needs 5120 bytes, 4608 bytes .* lower max_model_len to 8 or"):
        plan(MIXED, 9 * BLOCK_BYTES, max_model_len=9)


# The context length that fits.


def test_auto_is_what_one_request_can_have():
    assert plan(LAYERS, 10 * BLOCK_BYTES, max_model_len=100, fit=True).max_model_len == 36
    assert plan(LAYERS, 10 * BLOCK_BYTES, max_model_len=35, fit=True).max_model_len == 35
    assert plan(LAYERS, max_model_len=100, fit=True, num_blocks_override=4).max_model_len == 12


def test_auto_in_a_model_with_windows():
    # 19 usable blocks, 3 of them in each of the two window groups: 13 of full attention.
    config = plan(MIXED, 20 * BLOCK_BYTES, max_model_len=1000, fit=True)
    assert config.max_model_len == 52
    assert config.blocks_needed(52) == 19


def test_auto_with_windows_alone_ends_at_what_was_given():
    assert plan(model(S, S), 4 * BLOCK_BYTES, max_model_len=10**6, fit=True).max_model_len == 10**6


@pytest.mark.parametrize(("layers", "num_blocks"), [(LAYERS, 1), (MIXED, 3)])
def test_auto_where_not_even_a_small_context_fits(layers, num_blocks):
    groups = num_blocks
    assert plan(layers, (groups + 1) * BLOCK_BYTES, max_model_len=100, fit=True).max_model_len == 4
    with pytest.raises(CapacityError, match=r"of 2 tokens, the least of use, needs .* missing; raise") as error:
        plan(layers, groups * BLOCK_BYTES, max_model_len=100, fit=True)
    assert error.value.details["needed_bytes"] == (groups + 1) * BLOCK_BYTES
    assert (error.value.details["available_bytes"], error.value.details["max_model_len"]) == (groups * BLOCK_BYTES, 0)


def test_a_context_without_room_for_a_token_to_generate_is_of_no_use():
    layers = model(full(block_size=1))
    with pytest.raises(CapacityError, match=r"2 tokens, the least of use, needs .* missing; raise"):
        plan(layers, 2 * PAGE // 4, max_model_len=100, fit=True)
    assert plan(layers, 3 * PAGE // 4, max_model_len=100, fit=True).max_model_len == 2


# Groups.


def test_two_full_and_four_sliding_layers_share_two_tensors():
    config = plan(MIXED, 20 * BLOCK_BYTES, max_model_len=16)
    assert names(config) == [[0, 1], [3, 4], [2, 5]]
    assert [group.spec for group in config.groups] == [S, S, F]
    assert config.num_tensors == 2
    assert config.num_blocks == 20


@pytest.mark.parametrize("max_model_len", [1024, 8192, 131072])
def test_gemma3_1b(max_model_len):
    """26 layers, every sixth of full attention: 4 of these and 22 with a window."""
    shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 256, "dtype": "bfloat16"}
    layers = model(*(full(**shape) if i % 6 == 5 else sliding(512, **shape) for i in range(26)))
    config = plan(layers, max_model_len=max_model_len, in_flight=4096, num_blocks_override=20_000)
    assert names(config) == [
        [0, 1, 2, 3],
        [4, 6, 7, 8],
        [9, 10, 12, 13],
        [14, 15, 16, 18],
        [19, 20, 21, 22],
        [24, 25],
        [5, 11, 17, 23],
    ]
    assert config.num_tensors == 4


def test_layers_that_alternate_are_two_groups():
    assert names(plan(model(S, F, S, F, S, F), max_model_len=64)) == [[0, 2, 4], [1, 3, 5]]


def test_one_layer_that_is_large_is_not_padded_to_many_that_are_small():
    """Of full attention a request of 4096 tokens takes 1024 blocks, with the window 3."""
    config = plan(model(F, S, S, S, S, S), max_model_len=4096)
    assert names(config) == [[0], [1], [2], [3], [4], [5]]
    assert config.num_tensors == 1


def test_where_padding_costs_little_groups_are_few():
    """Seven and eight layers: with eight in a group one page of 16 is unused, with one there would be 15 groups."""
    config = plan(model(*[F] * 7, *[S] * 8), max_model_len=12)
    assert [len(group.layer_names) for group in config.groups] == [7, 8]
    assert config.num_tensors == 8


def test_windows_of_two_lengths_are_two_kinds():
    assert names(plan(model(S, sliding(4), S, sliding(4)), max_model_len=64)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize("fit", [False, True])
def test_a_window_that_hides_nothing_is_full_attention(fit):
    config = plan(MIXED, 20 * BLOCK_BYTES * 3, max_model_len=8, fit=fit)
    assert names(config) == [[0, 1, 2, 3, 4, 5]]
    assert config.groups[0].spec == F
    assert len(plan(MIXED, max_model_len=9, fit=fit).groups) == 3


def test_a_window_that_hides_nothing_of_the_fitted_length_stays_one():
    """What was decided for the length that was given holds for every shorter one."""
    config = plan(MIXED, 6 * BLOCK_BYTES, max_model_len=64, fit=True)
    assert config.max_model_len == 4
    assert [group.spec for group in config.groups] == [S, S, F]


# Pages of different sizes.


def test_smaller_pages_get_more_tokens():
    """KV heads 2 and 1, head sizes 8 and 16: pages of 512, 256 and 1024 bytes become 1024, of 8, 16 and 4 tokens."""
    wide, plain, large = full(num_kv_heads=2), full(), full(num_kv_heads=2, head_size=16)
    config = plan(model(wide, plain, large), 10 * 1024, max_model_len=8)
    assert [group.spec.block_size for group in config.groups] == [8, 16, 4]
    assert {group.spec.page_size_bytes for group in config.groups} == {1024}
    assert [group.spec.num_kv_heads for group in config.groups] == [2, 1, 2]
    assert config.num_tensors == 1
    assert config.num_blocks == 10
    assert config.blocks_needed(8) == 1 + 1 + 2


def test_pages_of_half_precision_beside_full():
    config = plan(model(full(), full(dtype="bfloat16")), max_model_len=8)
    assert [group.spec.block_size for group in config.groups] == [4, 8]


def test_pages_that_do_not_divide():
    layers = model(full(), full(num_kv_heads=3), full(num_kv_heads=2))
    with pytest.raises(
        ConfigError,
        match=r"layers\.2 is .*2 KV heads.* and layer layers\.1 is .*3 KV heads.*: 768 bytes is no multiple of 512",
    ) as error:
        plan(layers)
    assert error.value.details["value"] == "layers.2"


def test_block_sizes_that_do_not_divide():
    layers = model(full(block_size=4, num_kv_heads=3), full(block_size=6, num_kv_heads=2))
    with pytest.raises(ConfigError, match=r"layers\.1 .*: 6 tokens in a page is no multiple of 4"):
        plan(layers)


# Ranks that disagree.


@pytest.mark.parametrize("fields", [{"block_size": 8}, {"num_kv_heads": 2}, {"head_size": 16}, {"dtype": "float16"}])
def test_ranks_must_agree(fields):
    other = LAYERS | {"layers.1": full(**fields)}
    with pytest.raises(ConfigError, match=r"layer layers\.1 is .* on rank 0 and .* on rank 1"):
        plan_ranks([LAYERS, other], [10**6] * 2)


def test_chunks_that_hide_nothing_are_full_attention():
    assert [group.spec for group in plan(model(chunked(8, 4)), max_model_len=9).groups] == [chunked(8, 4)]
    (group,) = plan(model(chunked(8, 4)), max_model_len=8).groups
    assert group.spec == FullAttentionSpec(4, 1, 8, "float32", 4)


def test_layers_with_values_of_another_width_are_a_group_of_their_own():
    """Pages of equal size all the same: 4 heads of 8 + 8 numbers, and 2 of 24 + 8."""
    layers = model(full(num_kv_heads=4), FullAttentionSpec(4, 2, 24, "float32", 8), full(num_kv_heads=4))
    config = plan(layers)
    assert {name: group.spec for group in config.groups for name in group.layer_names} == layers
    assert names(config) == [[0], [2], [1]]


def test_ranks_must_agree_on_values():
    wide = FullAttentionSpec(4, 1, 8, "float32", 16)
    with pytest.raises(ConfigError, match=r"dtype float32\) on rank 0 and .*dtype float32, v_head_size 16\) on rank 1"):
        plan_ranks([model(F), model(wide)], [10**6] * 2)


def test_latents_are_a_group_of_their_own():
    """In blocks of twice the tokens beside 2 heads: a row is for all heads."""
    config = plan(model(latent(), full(num_kv_heads=2), latent()))
    assert [(group.layer_names, group.spec) for group in config.groups] == [
        (["layers.0"], latent(block_size=8)),
        (["layers.2"], latent(block_size=8)),
        (["layers.1"], full(num_kv_heads=2)),
    ]


def test_ranks_must_agree_on_latents():
    """Every rank has the whole row, however the heads are split."""
    with pytest.raises(ConfigError, match=r"\(block_size 4, latents, kv_lora_rank 12, .* rank 0 and .*kv_lora_rank 28"):
        plan_ranks([model(latent()), model(latent(28))], [10**6] * 2)


def test_ranks_must_agree_on_windows():
    with pytest.raises(
        ConfigError, match=r"layers\.0 is .*sliding_window 8\) on rank 0 and .*dtype float32\) on rank 1"
    ):
        plan_ranks([model(S), model(F)], [10**6] * 2)


def test_ranks_must_have_the_same_layers():
    with pytest.raises(ConfigError, match=r"rank 0 has 2 .* rank 1 has 1; they differ in layers\.1"):
        plan_ranks([LAYERS, model(full())], [10**6] * 2)


def test_no_layers():
    with pytest.raises(ConfigError, match="no attention layer"):
        plan({})


# Any model.

KINDS = st.one_of(
    st.builds(full, num_kv_heads=st.sampled_from([1, 2, 4])),
    st.builds(sliding, st.integers(1, 40), num_kv_heads=st.sampled_from([1, 2])),
    st.builds(chunked, st.integers(1, 40), st.sampled_from([None, 24])),
    st.builds(latent, st.sampled_from([12, 28])),
)
OPTIONS = st.fixed_dictionaries({"max_model_len": st.integers(2, 300), "in_flight": st.integers(1, 64)})


@st.composite
def models(draw) -> dict[str, KVCacheSpec]:
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3))
    return model(*draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=24)))


@given(models(), st.lists(st.integers(0, 2**20), min_size=1, max_size=4), OPTIONS)
@settings(max_examples=num_examples(100, 300), deadline=None)
def test_the_plan_of_any_model(layers, available_bytes, options):
    try:
        config = plan_ranks([layers] * len(available_bytes), available_bytes, **options)
    except CapacityError as error:
        check_refusal(error, layers, min(available_bytes), options)
        return
    assert config.total_bytes <= min(available_bytes) < (config.num_blocks + 1) * config.block_bytes
    assert config.blocks_needed(options["max_model_len"]) <= config.num_blocks - 1
    check_groups(config, layers, options["max_model_len"])


def check_refusal(error: CapacityError, layers, available_bytes: int, options) -> None:
    """What the error says was needed is needed: with it there is a plan, with one byte less none."""
    assert error.details["available_bytes"] == available_bytes < error.details["needed_bytes"]
    config = plan(layers, error.details["needed_bytes"], **options)
    assert config.total_bytes == error.details["needed_bytes"]
    with pytest.raises(CapacityError):
        plan(layers, error.details["needed_bytes"] - 1, **options)


def check_groups(config: KVCacheConfig, layers, max_model_len: int) -> None:
    """Each layer is in one group, and has tensor and pages to itself; no group but the last of a spec is short."""
    positions = [number for group in names(config) for number in group]
    assert sorted(positions) == list(range(len(layers)))
    assert all(group == sorted(group) for group in names(config))
    assert {group.spec.page_size_bytes for group in config.groups} == {config.page_size_bytes}
    smallest = min(group.spec.block_size for group in config.groups)
    assert all(group.spec.block_size % smallest == 0 for group in config.groups)
    for index, group in enumerate(config.groups):
        is_last_of_its_spec = group.spec not in [later.spec for later in config.groups[index + 1 :]]
        assert len(group.layer_names) == config.num_tensors or is_last_of_its_spec
        for name in group.layer_names:
            own, shared = layers[name], group.spec
            assert (own.num_kv_heads, own.head_size, own.dtype) == (shared.num_kv_heads, shared.head_size, shared.dtype)
            if isinstance(own, MLASpec):
                assert msgspec.structs.replace(shared, block_size=own.block_size) == own
                continue
            assert own.v_head_size == shared.v_head_size
            if isinstance(own, LocalAttentionSpec) and own.most_seen < max_model_len:
                assert type(shared) is type(own)
                assert shared.most_seen == own.most_seen
            else:
                assert isinstance(shared, FullAttentionSpec)


@given(models(), st.integers(0, 2**18), OPTIONS)
@settings(max_examples=num_examples(100, 300), deadline=None)
def test_the_fitted_length_is_the_largest(layers, available_bytes, options):
    limit = options["max_model_len"]
    try:
        fitted = plan(layers, available_bytes, fit=True, **options)
    except CapacityError as error:
        check_refusal(error, layers, available_bytes, options | {"fit": True})
        return
    usable = fitted.num_blocks - 1
    lengths = [n for n in range(1, limit + 1) if fitted.blocks_needed(n) <= usable]
    assert lengths == list(range(1, fitted.max_model_len + 1))
    if fitted.max_model_len == limit:
        assert fitted == plan(layers, available_bytes, **options)
    else:
        with pytest.raises(CapacityError) as caught:
            plan(layers, available_bytes, **options)
        assert caught.value.details["max_model_len"] == fitted.max_model_len
