"""Pads packed (varlen) prompts to one length per batch, with zeros after the tokens of each.

For attention kernels that take dense batches of few distinct lengths. The padding must be finite: a weight of 0 masks
no NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.fp8_kv import expand_codes
from ringcore.kernels.attention.kv_write import check_rows
from ringcore.kernels.attention.page_layout import PageLayout
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.packed_math import power_of_2

__all__ = ["gather_padded_kv", "gather_padded_kv_reference", "pad_prompts", "pad_prompts_reference"]

_BYTES_PER_WARP = 512  # 16 per thread, the widest load
_MAX_WARPS = 8


@triton.jit(do_not_specialize=["query_len", "padded_len"])
def _pad_kernel(
    rows: tl.tensor,  # [n, size], row stride `stride`
    out: tl.tensor,  # [num_prompts, padded_len, size]
    stride: int,
    query_len: int,
    padded_len: int,
    size: tl.constexpr,
    block: tl.constexpr,  # a power of two, size or more
    pdl: tl.constexpr,
) -> None:
    """One program per row of `out`."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    prompt = tl.program_id(0) // padded_len
    token = tl.program_id(0) % padded_len
    source = prompt.to(tl.int64) * query_len + token
    column = tl.arange(0, block)
    x = tl.load(rows + source * stride + column, mask=(column < size) & (token < query_len), other=0.0)
    tl.store(out + tl.program_id(0).to(tl.int64) * size + column, x, mask=column < size)


@triton.jit(do_not_specialize=["query_len", "padded_len"])
def _gather_padded_kernel(
    kv_cache: tl.tensor,  # see `page_layout`; values as wide as keys
    slot_mapping: tl.tensor,  # [n] int64
    key: tl.tensor,  # [num_prompts, padded_len, num_kv_heads, head_size]
    value: tl.tensor,  # as key
    query_len: int,
    padded_len: int,
    num_kv_heads: tl.constexpr,
    head_size: tl.constexpr,
    block_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_stride: tl.constexpr,
    page_size: tl.constexpr,
    exponent_offset: tl.constexpr,
    heads: tl.constexpr,  # num_kv_heads, rounded up to a power of two
    width: tl.constexpr,  # head_size, likewise
    pdl: tl.constexpr,
) -> None:
    """One program per row of `key` and of `value`."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0) % padded_len
    is_token = token < query_len
    slot = tl.load(slot_mapping + tl.program_id(0) // padded_len * query_len + token, mask=is_token, other=0)
    head = tl.arange(0, heads)[:, None]
    dim = tl.arange(0, width)[None, :]
    in_bounds = (head < num_kv_heads) & (dim < head_size)
    page = slot // block_size * page_size
    source = page + head * head_stride + slot % block_size * token_stride + dim
    target = tl.program_id(0).to(tl.int64) * (num_kv_heads * head_size) + head * head_size + dim
    keys = tl.load(kv_cache + source, mask=in_bounds & is_token, other=0)
    values = tl.load(kv_cache + source + value_offset, mask=in_bounds & is_token, other=0)
    if exponent_offset > 0:
        byte = kv_cache + page + exponent_offset + head * (2 * block_size) + slot % block_size
        is_stored = (head < num_kv_heads) & is_token
        key_exponents = tl.load(byte, mask=is_stored, other=0).to(tl.int32)
        value_exponents = tl.load(byte + block_size, mask=is_stored, other=0).to(tl.int32)
        keys = expand_codes(keys, tl.float32) * power_of_2(key_exponents)
        values = expand_codes(values, tl.float32) * power_of_2(value_exponents)
    tl.store(key + target, keys.to(key.dtype.element_ty), mask=in_bounds)
    tl.store(value + target, values.to(value.dtype.element_ty), mask=in_bounds)


def pad_prompts(rows: torch.Tensor, query_len: int, padded_len: int) -> torch.Tensor:
    """[num_prompts * query_len, num_heads, head_size] -> [num_prompts, padded_len, num_heads, head_size].

    The token stride is free, the heads of a token are contiguous. padded_len: query_len (then a view, no copy) or more.
    """
    num_tokens, num_heads, head_size = check_rows(rows)
    num_prompts = _num_prompts(num_tokens, query_len, padded_len)
    if padded_len == query_len:
        return rows.view(num_prompts, query_len, num_heads, head_size)
    size = num_heads * head_size
    out = rows.new_empty(num_prompts, padded_len, num_heads, head_size)
    block, pdl = triton.next_power_of_2(size), supports_pdl(rows.device)
    _pad_kernel[(num_prompts * padded_len,)](
        rows,
        out,
        rows.stride(0),
        query_len,
        padded_len,
        size=size,
        block=block,
        num_warps=_num_warps(block * rows.element_size()),
        pdl=pdl,
        **launch_options(pdl),
    )
    return out


def gather_padded_kv(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, query_len: int, padded_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gathers what `kv_write` wrote to the slots slot_mapping [num_prompts * query_len] int64 -> key and value, padded:
    [num_prompts, padded_len, num_kv_heads, head_size] in `dtype`. padded_len is query_len or more."""
    page = _page(kv_cache)
    num_kv_heads, head_size = page.num_kv_heads, page.head_size
    num_prompts = _num_prompts(len(slot_mapping), query_len, padded_len)
    assert slot_mapping.dtype == torch.int64
    assert kv_cache.is_contiguous()
    shape = num_prompts, padded_len, num_kv_heads, head_size
    key, value = (kv_cache.new_empty(shape, dtype=dtype) for _ in range(2))
    heads, width = triton.next_power_of_2(num_kv_heads), triton.next_power_of_2(head_size)
    pdl = supports_pdl(kv_cache.device)
    _gather_padded_kernel[(num_prompts * padded_len,)](
        kv_cache,
        slot_mapping,
        key,
        value,
        query_len,
        padded_len,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=page.block_size,
        token_stride=page.token_stride,
        value_offset=page.value_offset,
        head_stride=page.head_stride,
        page_size=page.page_size,
        exponent_offset=page.exponent_offset,
        heads=heads,
        width=width,
        num_warps=_num_warps(heads * width * key.element_size()),
        pdl=pdl,
        **launch_options(pdl),
    )
    return key, value


def _page(kv_cache: torch.Tensor) -> PageLayout:
    """Of a cache whose values are as wide as its keys."""
    return PageLayout.of(kv_cache, kv_cache.shape[1] // 2 - 1 if kv_cache.dtype == torch.uint8 else kv_cache.shape[-1])


def _num_prompts(num_tokens: int, query_len: int, padded_len: int) -> int:
    assert num_tokens % query_len == 0, (num_tokens, query_len)
    assert padded_len >= query_len, (padded_len, query_len)
    return num_tokens // query_len


def _num_warps(num_bytes: int) -> int:
    return min(_MAX_WARPS, max(1, num_bytes // _BYTES_PER_WARP))


def pad_prompts_reference(rows: torch.Tensor, query_len: int, padded_len: int) -> torch.Tensor:
    """`pad_prompts` in plain torch."""
    prompts = rows.reshape(-1, query_len, *rows.shape[1:])
    return torch.nn.functional.pad(prompts, (0, 0, 0, 0, 0, padded_len - query_len))


def gather_padded_kv_reference(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, query_len: int, padded_len: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_padded_kv` in plain torch."""
    page, token = _page(kv_cache), torch.arange(len(slot_mapping), device=kv_cache.device)
    blocks = page.read(kv_cache, slot_mapping // page.block_size, dtype)  # [n, num_kv_heads, block_size, head_size]
    rows = (kind[token, :, slot_mapping % page.block_size] for kind in blocks)
    key, value = (pad_prompts_reference(kind, query_len, padded_len) for kind in rows)
    return key, value
