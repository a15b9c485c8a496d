from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from step_driver import make_config

from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from ringcore.model_executor.parallel import SingleRank, TensorParallel
from ringcore.worker.memory import activation_bytes, format_table, memory_table
from ringcore.worker.platform import Platform

MIB = 2**20


class FakePlatform(Platform):
    device = torch.device("cpu")
    attention_backends: ClassVar[Sequence[str]] = ()
    default_memory_share: ClassVar[float] = 0.5
    attention_gathers: ClassVar[bool] = True

    @classmethod
    def is_present(cls) -> bool:
        return True

    def connect(self, rank: int, size: int, rendezvous: str) -> TensorParallel:
        return SingleRank()

    def memory_budget_bytes(self, share: float, num_ranks: int) -> int:
        return int(self.free_memory_bytes() * share / num_ranks)

    def resolve_dtype(self, asked: str, checkpoint: str) -> str:
        return "float32"

    def total_memory_bytes(self) -> int:
        return 1000 * MIB

    def free_memory_bytes(self) -> int:
        return 800 * MIB

    def allocate_pages(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def synchronize(self) -> None:
        pass


SPECS = {
    f"layers.{i}.attention": FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32")
    for i in range(3)
}


def table(model: str, **options: Any) -> dict[str, int]:
    config = make_config(model, max_num_seqs=100_000, **options)
    return memory_table(config, FakePlatform(), SPECS, "float32", weights_bytes=7)


def test_activations_by_hand(tiny_llama: tuple[str, Any]) -> None:
    """64 tokens: 4 * 64 hidden and the larger of 3 * 96 and (2 * 4 + 4 * 2) * 16; mask 64 x 128; logits 6 x 97."""
    config = make_config(tiny_llama[0])
    assert (
        activation_bytes(config.model.spec, config, "float32") == 64 * (256 + 288) * 4 + 64 * 128 * 4 + 4 * 6 * 97 * 4
    )


def test_the_parts_add_up(tiny_llama: tuple[str, Any]) -> None:
    found = table(tiny_llama[0])
    assert (found["total_bytes"], found["free_bytes"], found["weights_bytes"]) == (1000 * MIB, 800 * MIB, 7)
    assert found["budget_bytes"] == 400 * MIB
    parts = ("activations_bytes", "attention_gather_bytes", "available_kv_cache_bytes")
    assert sum(found[name] for name in parts) == found["budget_bytes"]
    assert found["attention_gather_bytes"] == pytest.approx(found["available_kv_cache_bytes"] / 3, rel=1e-6)


def test_the_share_and_the_ranks_divide_the_memory(tiny_llama: tuple[str, Any]) -> None:
    found = table(tiny_llama[0], gpu_memory_utilization=0.9, tensor_parallel_size=2)
    assert found["budget_bytes"] == 360 * MIB


def test_bytes_given_are_taken_as_they_are(tiny_llama: tuple[str, Any]) -> None:
    found = table(tiny_llama[0], kv_cache_bytes=123_456)
    assert found["available_kv_cache_bytes"] == 123_456
    assert "budget_bytes" not in found


def test_no_more_than_can_be_of_use(tiny_llama: tuple[str, Any]) -> None:
    """6 requests of 128 tokens have 32 blocks each; twice that, and the null block."""
    found = memory_table(make_config(tiny_llama[0]), FakePlatform(), SPECS, "float32", weights_bytes=0)
    assert found["available_kv_cache_bytes"] == (2 * 6 * 32 + 1) * 3 * (2 * 4 * 2 * 16 * 4)


def test_layers_that_share_tensors(tiny_llama: tuple[str, Any]) -> None:
    """Two layers of full attention and four with a window share two tensors, in three groups. A request of 128 tokens
    has 32 blocks in the full group, and 18 in each of the others: a window of 6 and 64 tokens in flight."""
    full = SPECS["layers.0.attention"]
    window = SlidingWindowSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32", sliding_window=6)
    specs: dict[str, KVCacheSpec] = {f"layers.{i}.attention": full if i % 3 == 2 else window for i in range(6)}
    options = {"steps_in_flight": 1, "max_num_seqs": 6}
    found = memory_table(make_config(tiny_llama[0], **options), FakePlatform(), specs, "float32", weights_bytes=0)
    assert found["available_kv_cache_bytes"] == (2 * 6 * (32 + 18 + 18) + 1) * 2 * (2 * 4 * 2 * 16 * 4)
    left = found["budget_bytes"] - found["activations_bytes"]
    assert found["attention_gather_bytes"] == left // 3


def test_too_little_memory_leaves_nothing(tiny_llama: tuple[str, Any]) -> None:
    assert table(tiny_llama[0], gpu_memory_utilization=1e-6)["available_kv_cache_bytes"] == 0


def test_the_text_has_every_entry_in_mib() -> None:
    text = format_table(1, {"total_bytes": 1000 * MIB, "available_kv_cache_bytes": 3 * MIB // 2})
    assert [line.split() for line in text.splitlines()] == [
        ["memory", "of", "rank", "1,", "MiB:"],
        ["total", "1000.0"],
        ["available", "kv", "cache", "1.5"],
    ]
