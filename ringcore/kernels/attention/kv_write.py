"""Writes the keys and values of a step's tokens into the KV cache pages of one layer.

Where they lie in a page: `page_layout`. A slot is a token's place: block_id * block_size + offset in the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.fp8_kv import round_row
from ringcore.kernels.attention.fp8_rows import largest_number
from ringcore.kernels.attention.page_layout import PageLayout
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["check_rows", "kv_write", "kv_write_reference"]


@triton.jit
def _kv_write_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    key_stride,
    value_stride,
    num_kv_heads: tl.constexpr,
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    v_head_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_stride: tl.constexpr,
    page_size: tl.constexpr,
    exponent_offset: tl.constexpr,
    largest: tl.constexpr,  # of FP8
    heads: tl.constexpr,  # num_kv_heads, rounded up to a power of two
    width: tl.constexpr,  # head_size, likewise
    v_width: tl.constexpr,
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
    token_start = slot // block_size * page_size + slot % block_size * token_stride
    target = token_start + head * head_stride + dim
    if v_head_size == head_size:
        v_in_bounds, v_source, v_target = in_bounds, source, target
    else:
        v_dim = tl.arange(0, v_width)[None, :]
        v_in_bounds = (head < num_kv_heads) & (v_dim < v_head_size)
        v_source = head * v_head_size + v_dim
        v_target = token_start + head * head_stride + v_dim
    key_row = key + token * key_stride + source
    value_row = value + token * value_stride + v_source
    if exponent_offset > 0:
        keys, key_exponents = round_row(tl.load(key_row, mask=in_bounds, other=0.0).to(tl.float32), largest)
        values, value_exponents = round_row(tl.load(value_row, mask=in_bounds, other=0.0).to(tl.float32), largest)
        byte = tl.arange(0, heads)
        byte = slot // block_size * page_size + byte * (2 * block_size) + exponent_offset + slot % block_size
        tl.store(kv_cache + byte, key_exponents, mask=tl.arange(0, heads) < num_kv_heads)
        tl.store(kv_cache + byte + block_size, value_exponents, mask=tl.arange(0, heads) < num_kv_heads)
    else:
        keys = tl.load(key_row, mask=in_bounds)
        values = tl.load(value_row, mask=v_in_bounds)
    tl.store(kv_cache + target, keys, mask=in_bounds)
    tl.store(kv_cache + v_target + value_offset, values, mask=v_in_bounds)


def kv_write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes key [num_tokens, num_kv_heads, head_size] and value [num_tokens, num_kv_heads, v_head_size] to the slots
    slot_mapping [num_tokens] int64.

    If several tokens have one slot, as padding has in the null block, any of them may win. The token stride is free, as
    in slices of a fused QKV projection; the heads of a token are contiguous.
    """
    num_tokens, num_kv_heads, head_size = check_rows(key)
    page = PageLayout.of(kv_cache, head_size)
    assert page.num_kv_heads == num_kv_heads
    assert check_rows(value) == (num_tokens, num_kv_heads, page.v_head_size)
    assert slot_mapping.shape == (num_tokens,)
    assert slot_mapping.dtype == torch.int64
    assert key.dtype == value.dtype
    assert kv_cache.dtype == (torch.uint8 if page.exponent_offset else key.dtype)
    if num_tokens == 0:
        return
    heads, width, v_width = (triton.next_power_of_2(n) for n in (num_kv_heads, head_size, page.v_head_size))
    pdl = supports_pdl(key.device)
    _kv_write_kernel[(num_tokens,)](
        key,
        value,
        kv_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        **page._asdict(),
        largest=largest_number(key.dtype),
        heads=heads,
        width=width,
        v_width=v_width,
        # 16 bytes per thread and load, the widest.
        num_warps=min(8, max(1, heads * max(width, v_width) * key.element_size() // (16 * 32))),
        pdl=pdl,
        **launch_options(pdl),
    )


def kv_write_reference(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """As `kv_write`, by torch's indexing."""
    PageLayout.of(kv_cache, key.shape[2]).write(kv_cache, slot_mapping, (key, value))


def check_rows(rows: torch.Tensor) -> tuple[int, int, int]:
    """The shape of [num_tokens, num_heads, head_size]; asserts that the heads of a token are contiguous."""
    num_tokens, num_heads, head_size = rows.shape
    wanted = ((num_heads, head_size), (head_size, 1))
    assert num_tokens == 0 or all(
        size == 1 or stride == want for (size, want), stride in zip(wanted, rows.stride()[1:], strict=True)
    ), "the heads of a token are not contiguous"
    return num_tokens, num_heads, head_size
