"""Writes the keys and values of a step's tokens into the KV cache pages of one layer.

One layer's cache is [num_blocks, 2, num_kv_heads, block_size, head_size]: in each block keys then values, head by head,
so that one head's part of a block is block_size * head_size contiguous elements.
A slot is a token's place: block_id * block_size + offset in the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["check_rows", "kv_write", "kv_write_reference", "padded_head_size"]


@triton.jit
def _kv_write_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    key_stride,
    value_stride,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    block_size: tl.constexpr,
    heads: tl.constexpr,  # num_kv_heads, rounded up to a power of two
    width: tl.constexpr,  # head_size, likewise
    pdl: tl.constexpr,
):
    """One program per token."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.arange(0, heads)[:, None]
    dim = tl.arange(0, width)[None, :]
    in_bounds = (head < num_kv_heads) & (dim < head_size)
    source = head * head_size + dim
    half_page = num_kv_heads * block_size * head_size
    target = slot // block_size * (2 * half_page) + (head * block_size + slot % block_size) * head_size + dim
    key_row = key + token * key_stride + source
    value_row = value + token * value_stride + source
    keys = tl.load(key_row, mask=in_bounds)
    values = tl.load(value_row, mask=in_bounds)
    tl.store(kv_cache + target, keys, mask=in_bounds)
    tl.store(kv_cache + target + half_page, values, mask=in_bounds)


def kv_write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes key and value [num_tokens, num_kv_heads, head_size] to the slots slot_mapping [num_tokens] int64.

    If several tokens have one slot, as padding has in the null block, any of them may win. The token stride is free, as
    in slices of a fused QKV projection; the heads of a token are contiguous.
    """
    num_tokens, num_kv_heads, head_size = check_rows(key)
    assert check_rows(value) == (num_tokens, num_kv_heads, head_size)
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.dtype == torch.int64
    assert kv_cache.is_contiguous()
    assert kv_cache.shape[1:3] == (2, num_kv_heads)
    assert kv_cache.shape[4] == head_size
    assert kv_cache.dtype == key.dtype == value.dtype
    if num_tokens == 0:
        return
    heads, width = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_size)
    pdl = supports_pdl(key.device)
    _kv_write_kernel[(num_tokens,)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=kv_cache.shape[3],
        heads=heads,
        width=width,
        # 16 bytes per thread and load, the widest.
        num_warps=min(8, max(1, heads * width * key.element_size() // (16 * 32))),
        pdl=pdl,
        **launch_options(pdl),
    )


def kv_write_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """As `kv_write`, by torch's indexing."""
    block_size = kv_cache.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[blocks, 0, :, offsets] = key
    kv_cache[blocks, 1, :, offsets] = value


def check_rows(rows: torch.Tensor) -> tuple[int, int, int]:
    """The shape of [num_tokens, num_heads, head_size]; asserts that the heads of a token are contiguous."""
    num_tokens, num_heads, head_size = rows.shape
    wanted = ((num_heads, head_size), (head_size, 1))
    assert num_tokens == 0 or all(
        size == 1 or stride == want for (size, want), stride in zip(wanted, rows.stride()[1:], strict=True)
    ), "the heads of a token are not contiguous"
    return num_tokens, num_heads, head_size


def padded_head_size(head_size: int) -> int:
    """The width of its tile: a power of two that tl.dot takes."""
    return max(16, triton.next_power_of_2(head_size))
