"""Keys and values come to their slots, bit by bit, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

from ringcore.kernels.attention.kv_write import kv_write, kv_write_reference
from ringcore.kernels.attention.page_layout import PageLayout

pytestmark = pytest.mark.sampled


def random_cache(num_blocks: int, num_kv_heads: int, block_size: int, head_size: int, like: torch.Tensor):
    shape = (num_blocks, 2, num_kv_heads, block_size, head_size)
    return torch.randn(shape, device=like.device).to(like.dtype)


def assert_written(key, value, slots, kv_cache) -> None:
    expected = kv_cache.clone()
    kv_write_reference(key, value, expected, slots)
    kv_write(key, value, kv_cache, slots)
    assert torch.equal(kv_cache[1:], expected[1:])
    tokens = slots.cpu().tolist()
    assert all(
        torch.equal(kv_cache[slot // kv_cache.shape[3], 0, :, slot % kv_cache.shape[3]], key[i])
        for i, slot in enumerate(tokens)
        if tokens.count(slot) == 1
    )


@pytest.mark.parametrize(
    ("num_kv_heads", "head_size", "v_head_size", "block_size"), [(1, 24, 16, 16), (3, 16, 40, 48), (16, 192, 128, 16)]
)
def test_values_of_another_width_lie_behind_their_keys(
    device, num_kv_heads, head_size, v_head_size, block_size
) -> None:
    torch.manual_seed(0)
    key, value = (torch.randn(5, num_kv_heads, size, device=device) for size in (head_size, v_head_size))
    kv_cache = torch.randn(PageLayout.shape(4, num_kv_heads, block_size, head_size, v_head_size), device=device)
    slots = (torch.randperm(3 * block_size, device=device) + block_size)[:5]
    expected = kv_cache.clone()
    for token, slot in enumerate(slots.tolist()):
        expected[slot // block_size, :, slot % block_size] = torch.cat((key[token], value[token]), 1)
    by_reference = kv_cache.clone()
    kv_write_reference(key, value, by_reference, slots)
    kv_write(key, value, kv_cache, slots)
    assert torch.equal(by_reference, expected)
    assert torch.equal(kv_cache, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_kv_heads", "head_size", "block_size"), [(1, 64, 16), (2, 80, 32), (3, 96, 16), (8, 128, 64), (5, 256, 48)]
)
def test_every_token_comes_to_its_slot(device, dtype, num_kv_heads, head_size, block_size) -> None:
    torch.manual_seed(0)
    fused = torch.randn(11, num_kv_heads * 2 + 3, head_size, device=device).to(dtype)
    key, value = fused[:, 3 : 3 + num_kv_heads], fused[:, 3 + num_kv_heads :]
    kv_cache = random_cache(7, num_kv_heads, block_size, head_size, key)
    slots = (torch.randperm(6 * block_size, device=device) + block_size)[:11]
    slots[:2] = torch.tensor([block_size, 7 * block_size - 1])  # the first place and the last
    slots[2:] = torch.where((slots[2:] == slots[0]) | (slots[2:] == slots[1]), 0, slots[2:])
    assert_written(key, value, slots, kv_cache)


def test_of_several_tokens_in_one_slot_of_the_null_block_each_number_is_one_of_theirs(device) -> None:
    torch.manual_seed(0)
    key, value = torch.randn(2, 6, 2, 64, device=device)
    kv_cache = random_cache(3, 2, 16, 64, key)
    slots = torch.tensor([5, 40, 5, 5, 17, 5], device=device)
    assert_written(key, value, slots, kv_cache)
    writers = [0, 2, 3, 5]
    for kind, new in enumerate((key, value)):
        assert (kv_cache[0, kind, :, 5] == new[writers]).any(dim=0).all()


def test_no_tokens(device) -> None:
    key = torch.empty(0, 2, 64, device=device)
    kv_cache = random_cache(2, 2, 16, 64, key)
    before = kv_cache.clone()
    kv_write(key, key, kv_cache, torch.empty(0, dtype=torch.int64, device=device))
    assert torch.equal(kv_cache, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a cache of more than 2^31 numbers takes a GPU")
def test_slots_far_behind(device) -> None:
    num_blocks = 2**31 // (2 * 8 * 16 * 128) + 100
    key, value = torch.randn(2, 8192, 8, 128, device=device, dtype=torch.bfloat16)
    kv_cache = torch.zeros(num_blocks, 2, 8, 16, 128, device=device, dtype=torch.bfloat16)
    slots = torch.randperm(num_blocks * 16 - 16, device=device)[:8192] + 16
    slots[0] = num_blocks * 16 - 1
    kv_write(key, value, kv_cache, slots)
    keys, values = kv_cache.unbind(1)
    assert torch.equal(keys[slots // 16, :, slots % 16][0], key[0])
    unique = torch.ones(8192, dtype=torch.bool, device=device)
    unique[1:] = slots[1:] != slots[0]
    assert torch.equal(keys[slots // 16, :, slots % 16][unique], key[unique])
    assert torch.equal(values[slots // 16, :, slots % 16][unique], value[unique])
