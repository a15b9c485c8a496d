"""One pass between QKV projection and attention: q/k head norms, rotary embedding (RoPE), and the KV cache write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.attention.fp8_kv import round_row
from ringcore.kernels.attention.fp8_rows import largest_number
from ringcore.kernels.attention.page_layout import PageLayout
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["LARGEST", "qk_norm_rope", "qk_norm_rope_reference"]

_ELEMENTS = 1024  # of one program, in whole heads
_ELEMENTS_PER_WARP = 256  # 8 per thread: one 16-byte load of 16-bit elements
LARGEST = {torch.float16: torch.finfo(torch.float16).max}  # of what a cache in this dtype is clamped to


@triton.jit
def _qk_norm_rope_kernel(
    qkv: tl.tensor,  # [n, num_heads + 2 * num_kv_heads, head_size]
    out: tl.tensor,  # as qkv
    positions: tl.tensor,  # [n] int64, read where has_positions
    cos_sin: tl.tensor,  # [num_positions, head_size] float32; without positions one row per token
    norm_weight: tl.tensor,  # [2, head_size], read where has_norm
    kv_cache: tl.tensor,  # see `page_layout`, written where writes_kv
    slot_mapping: tl.tensor,  # [n] int64, read where writes_kv
    eps: float,
    num_heads: tl.constexpr,
    block_dim: tl.constexpr,  # a power of two, head_size or more
    heads_per_program: tl.constexpr,
    stored_heads: tl.constexpr,  # leading heads of a token that are stored in out
    num_kv_heads: tl.constexpr,  # this and the next eight: see `PageLayout`
    block_size: tl.constexpr,
    head_size: tl.constexpr,
    v_head_size: tl.constexpr,
    token_stride: tl.constexpr,
    value_offset: tl.constexpr,
    head_stride: tl.constexpr,
    page_size: tl.constexpr,
    exponent_offset: tl.constexpr,
    has_positions: tl.constexpr,
    has_norm: tl.constexpr,
    writes_kv: tl.constexpr,
    largest: tl.constexpr,  # clamp of the KV write, for FP8, and a dtype that keys may overflow; 0: none
    pdl: tl.constexpr,
) -> None:
    num_rotated: tl.constexpr = num_heads + num_kv_heads
    num_all: tl.constexpr = num_rotated + num_kv_heads
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * heads_per_program + tl.arange(0, heads_per_program)
    dims = tl.arange(0, block_dim)
    is_key = (heads >= num_heads) & (heads < num_rotated)
    is_value = heads >= num_rotated
    mask = (heads < num_all)[:, None] & (dims < head_size)[None, :]
    offsets = (token * num_all + heads)[:, None] * head_size + dims[None, :]
    if pdl:
        gdc_launch_dependents()
    if has_norm:
        rows = norm_weight + is_key.to(tl.int32)[:, None] * head_size + dims[None, :]
        gain = tl.load(rows, mask=(dims < head_size)[None, :], other=0.0)
    if pdl:
        gdc_wait()
    x = tl.load(qkv + offsets, mask=mask, other=0.0)
    if writes_kv:
        slot = tl.load(slot_mapping + token)
    if has_positions:
        row = tl.load(positions + token)
    else:
        row = token
    angles = tl.load(cos_sin + row * head_size + dims, mask=dims < head_size, other=0.0)
    y = x.to(tl.float32)
    if has_norm:
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) / head_size + eps)[:, None] * gain.to(tl.float32)
    cos, sin = tl.split(tl.reshape(angles, [1, block_dim // 2, 2]))
    first, second = tl.split(tl.reshape(y, [heads_per_program, block_dim // 2, 2]))
    rotated = tl.interleave(first * cos - second * sin, second * cos + first * sin)
    y = tl.where(is_value[:, None], x.to(tl.float32), rotated)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask & (heads < stored_heads)[:, None])
    if writes_kv:
        kv_heads = tl.where(is_value, heads - num_rotated, heads - num_heads)
        kinds = is_value.to(tl.int64)
        page = slot // block_size * page_size
        places = page + kv_heads * head_stride + kinds * value_offset + slot % block_size * token_stride
        places = places[:, None] + dims[None, :]
        is_stored = (heads >= num_heads) & (heads < num_all)
        if exponent_offset > 0:  # of what is stored in `out`, as every other writer rounds it
            y = tl.where(mask, y.to(out.dtype.element_ty).to(tl.float32), 0.0)
            codes, exponents = round_row(y, largest)
            tl.store(kv_cache + places, codes, mask=mask & is_stored[:, None])
            byte = page + exponent_offset + (2 * kv_heads + kinds) * block_size + slot % block_size
            tl.store(kv_cache + byte, exponents, mask=is_stored)
        else:
            if largest > 0:
                y = tl.where(y == y, tl.minimum(tl.maximum(y, -largest), largest), 0.0)
            tl.store(kv_cache + places, y.to(kv_cache.dtype.element_ty), mask=mask & is_stored[:, None])


def qk_norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotates the heads of q and k by the angles of their positions (RoPE), in place or, together with v, into `out`.

    qkv and out: [n, (num_heads + 2 * num_kv_heads) * head_dim], contiguous, the heads of q, then of k, then of v; the
    rotated pairs are interleaved, 2i and 2i + 1. positions: [n] int64. cos_sin: [num_positions, head_dim] float32,
    cosine and sine of each pair interleaved; without positions it has one row per token, which saves each layer the
    gather. norm_weight: [2, head_dim], q's then k's: each head is first divided by its root mean square and multiplied
    by it, as `rms_norm` does, in any float dtype.
    kv_cache: of qkv's dtype or in FP8, as in `page_layout`; the finished keys and the values of token i go to slot
    slot_mapping[i] = block_id * block_size + offset, [n] int64. In FP8, and in float16, whose keys can overflow where
    hidden states do not, the write is clamped: the largest finite number for infinity, 0 for NaN.

    Computed in float32 and rounded once. Returns `out`, or qkv. Method: Su et al., "RoFormer", arXiv 2104.09864.
    """
    n, num_all, head_dim = len(qkv), num_heads + 2 * num_kv_heads, cos_sin.shape[1]
    stored = num_all if out is not None else num_heads + num_kv_heads
    out = qkv if out is None else out
    assert head_dim % 2 == 0, head_dim
    assert qkv.shape == (n, num_all * head_dim), (qkv.shape, num_heads, num_kv_heads, head_dim)
    assert (out.shape, out.dtype) == (qkv.shape, qkv.dtype), "out must have the shape and dtype of qkv"
    if positions is None:
        assert len(cos_sin) == n, (cos_sin.shape, n)
    else:
        assert (positions.shape, positions.dtype) == ((n,), torch.int64), (positions.shape, positions.dtype)
    assert cos_sin.dtype == torch.float32, cos_sin.dtype
    assert norm_weight is None or norm_weight.shape == (2, head_dim), norm_weight.shape
    page, largest = PageLayout.without_pages(num_kv_heads, head_dim), 0.0
    if kv_cache is not None:
        assert slot_mapping is not None, "kv_cache needs slot_mapping"
        assert (slot_mapping.shape, slot_mapping.dtype) == ((n,), torch.int64), (slot_mapping.shape, slot_mapping.dtype)
        page = PageLayout.of(kv_cache, head_dim)
        assert (page.num_kv_heads, page.v_head_size) == (num_kv_heads, head_dim), kv_cache.shape
        assert kv_cache.dtype == (torch.uint8 if page.exponent_offset else qkv.dtype), kv_cache.dtype
        largest = largest_number(qkv.dtype) if page.exponent_offset else LARGEST.get(qkv.dtype, 0.0)
    for tensor in (qkv, out, positions, cos_sin, norm_weight, kv_cache, slot_mapping):
        assert tensor is None or tensor.is_contiguous(), "tensors must be contiguous"
    if not n:
        return out
    block_dim = triton.next_power_of_2(head_dim)
    # In place and without a KV write the values need no program.
    touched = stored if kv_cache is None else num_all
    heads_per_program = min(max(1, _ELEMENTS // block_dim), triton.next_power_of_2(touched))
    pdl = supports_pdl(qkv.device)
    _qk_norm_rope_kernel[(n, triton.cdiv(touched, heads_per_program))](
        qkv,
        out,
        qkv if positions is None else positions,
        cos_sin,
        qkv if norm_weight is None else norm_weight,
        qkv if kv_cache is None else kv_cache,
        qkv if slot_mapping is None else slot_mapping,
        eps,
        num_heads=num_heads,
        block_dim=block_dim,
        heads_per_program=heads_per_program,
        stored_heads=stored,
        **page._asdict(),
        has_positions=positions is not None,
        has_norm=norm_weight is not None,
        writes_kv=kv_cache is not None,
        largest=largest,
        pdl=pdl,
        num_warps=max(1, heads_per_program * block_dim // _ELEMENTS_PER_WARP),
        **launch_options(pdl),
    )
    return out


def qk_norm_rope_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`qk_norm_rope` in plain torch."""
    n, head_dim = len(qkv), cos_sin.shape[1]
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    q, k, v = torch.split_with_sizes(qkv.view(n, sum(sizes), head_dim).float(), sizes, dim=1)
    if norm_weight is not None:
        q, k = (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
            for x, weight in zip((q, k), norm_weight, strict=True)
        )
    rotation = torch.view_as_complex(cos_sin.view(-1, 1, head_dim // 2, 2))
    rotation = rotation if positions is None else rotation[positions]
    q, k = (
        torch.view_as_real(torch.view_as_complex(x.reshape(n, -1, head_dim // 2, 2)) * rotation).flatten(2)
        for x in (q, k)
    )
    if kv_cache is not None:
        assert slot_mapping is not None
        new = k.to(qkv.dtype), v.to(qkv.dtype)
        if qkv.dtype == torch.float16:
            new = torch.nan_to_num(new[0]), torch.nan_to_num(new[1])
        PageLayout.of(kv_cache, head_dim).write(kv_cache, slot_mapping, new)
    return (qkv if out is None else out).copy_(torch.cat((q, k, v), dim=1).view(n, -1))
