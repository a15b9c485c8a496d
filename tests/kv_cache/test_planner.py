"""Blocks from bytes: two layers of pages of 4 tokens, 2 * 4 * 1 * 8 * 4 = 256 bytes a page, 512 bytes a block."""

from __future__ import annotations

import pytest

from ringcore.errors import CapacityError, ConfigError
from ringcore.kv_cache.planner import plan_kv_cache
from ringcore.kv_cache.spec import FullAttentionSpec

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
LAYERS = {"layers.0": SPEC, "layers.1": SPEC}
BLOCK_BYTES = 512


def changed(**fields) -> FullAttentionSpec:
    values = {"block_size": 4, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"} | fields
    return FullAttentionSpec(**values)


def test_blocks_that_the_bytes_hold():
    (config,) = plan_kv_cache([LAYERS], [10 * BLOCK_BYTES + 511], max_model_len=36, num_blocks_override=None)
    assert config.num_blocks == 10
    assert [(group.layer_names, group.spec) for group in config.groups] == [(["layers.0", "layers.1"], SPEC)]
    assert config.total_bytes == 10 * BLOCK_BYTES


def test_every_rank_has_the_least_of_all():
    configs = plan_kv_cache(
        [LAYERS] * 2, [32 * BLOCK_BYTES, 20 * BLOCK_BYTES], max_model_len=8, num_blocks_override=None
    )
    assert [config.num_blocks for config in configs] == [20, 20]


def test_override_wins_over_the_bytes():
    (config,) = plan_kv_cache([LAYERS], [0], max_model_len=8, num_blocks_override=7)
    assert config.num_blocks == 7


@pytest.mark.parametrize("max_model_len", [33, 36])
def test_the_null_block_is_counted(max_model_len):
    plan_kv_cache([LAYERS], [10 * BLOCK_BYTES], max_model_len=max_model_len, num_blocks_override=None)
    with pytest.raises(CapacityError):
        plan_kv_cache([LAYERS], [9 * BLOCK_BYTES], max_model_len=max_model_len, num_blocks_override=None)


def test_too_small_gives_the_numbers_and_what_fits():
    with pytest.raises(CapacityError) as error:
        plan_kv_cache([LAYERS], [10 * BLOCK_BYTES], max_model_len=37, num_blocks_override=None)
    assert error.value.details == {
        "needed_bytes": 11 * BLOCK_BYTES,
        "available_bytes": 10 * BLOCK_BYTES,
        "max_model_len": 36,
    }
    assert error.value.message == (
        "KV cache: one request of 37 tokens needs 5632 bytes, 5120 bytes free; "
        "lower max_model_len to 36 or raise gpu_memory_utilization/kv_cache_bytes"
    )
    plan_kv_cache([LAYERS], [10 * BLOCK_BYTES], max_model_len=36, num_blocks_override=None)


def test_sizes_of_a_real_model_are_in_gib():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")  # 64 KiB a page
    layers = {f"layers.{i}": spec for i in range(32)}  # 2 MiB a block
    with pytest.raises(CapacityError, match=r"32768 tokens needs 4\.00 GiB, 2\.50 GiB free; .* to 20464 or"):
        plan_kv_cache([layers], [5 * 2**29], max_model_len=32768, num_blocks_override=None)


@pytest.mark.parametrize("available", [-5, 0, 511, BLOCK_BYTES])
def test_no_length_fits(available):
    with pytest.raises(CapacityError, match="free; raise gpu_memory") as error:
        plan_kv_cache([LAYERS], [available], max_model_len=4, num_blocks_override=None)
    assert error.value.details["max_model_len"] == 0


def test_override_too_small():
    with pytest.raises(CapacityError, match="lower max_model_len to 4 or raise num_blocks_override=2") as error:
        plan_kv_cache([LAYERS], [10**9], max_model_len=5, num_blocks_override=2)
    assert error.value.details["available_bytes"] == 2 * BLOCK_BYTES


@pytest.mark.parametrize("fields", [{"block_size": 8}, {"num_kv_heads": 2}, {"head_size": 16}, {"dtype": "float16"}])
def test_ranks_must_agree(fields):
    other = LAYERS | {"layers.1": changed(**fields)}
    with pytest.raises(ConfigError, match=r"layer layers\.1 is .* on rank 0 and .* on rank 1"):
        plan_kv_cache([LAYERS, other], [10**6] * 2, max_model_len=4, num_blocks_override=None)


def test_layers_must_agree():
    mixed = LAYERS | {"layers.1": changed(num_kv_heads=2)}
    with pytest.raises(ConfigError, match=r"layer layers\.0 is .*1 KV heads.* and layer layers\.1 is .*2 KV heads"):
        plan_kv_cache([mixed, mixed], [10**6] * 2, max_model_len=4, num_blocks_override=None)


def test_ranks_must_have_the_same_layers():
    with pytest.raises(ConfigError, match=r"rank 0 has 2 .* rank 1 has 1; they differ in layers\.1"):
        plan_kv_cache([LAYERS, {"layers.0": SPEC}], [10**6] * 2, max_model_len=4, num_blocks_override=None)


def test_no_layers():
    with pytest.raises(ConfigError, match="no attention layer"):
        plan_kv_cache([{}], [10**6], max_model_len=4, num_blocks_override=None)
