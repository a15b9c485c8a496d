"""What latent attention does between its projections: the norm of the latent, the rotations, and the KV cache write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl

__all__ = ["latent_rows", "latent_rows_reference", "rotate_heads", "rotate_heads_reference"]

_LARGEST_HALF = torch.finfo(torch.float16).max


@triton.jit
def _rotated(x, first_place, places, cos_sin, token, mask, head_dim: tl.constexpr):
    """Of places of a head of which 2i and 2i + 1 are a pair, x being the numbers there, as float32."""
    partner = tl.load(first_place + (places ^ 1), mask=mask, other=0.0).to(tl.float32)
    pair = cos_sin + token * head_dim + places // 2 * 2
    cos = tl.load(pair, mask=mask, other=0.0)
    sin = tl.load(pair + 1, mask=mask, other=0.0)
    return x * cos + tl.where(places % 2 == 0, -partner, partner) * sin


@triton.jit
def _latent_rows_kernel(
    compressed: tl.tensor,  # [n, rank + rope], of row stride `stride`
    rows: tl.tensor,  # [n, rank + rope]
    gain: tl.tensor,  # [rank]
    cos_sin: tl.tensor,  # [n, rope] float32
    kv_cache: tl.tensor,  # [num_slots, rank + rope], written where writes_kv
    slot_mapping: tl.tensor,  # [n] int64, read where writes_kv
    stride,
    eps: float,
    rank: tl.constexpr,
    rope: tl.constexpr,
    block_rank: tl.constexpr,  # a power of two, rank or more; likewise the next
    block_rope: tl.constexpr,
    writes_kv: tl.constexpr,
    largest: tl.constexpr,  # clamp of the KV write, for a dtype that rows may overflow; 0: none
    pdl: tl.constexpr,
) -> None:
    """One program per token."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block_rank)
    if pdl:
        gdc_launch_dependents()
    weight = tl.load(gain + at, mask=at < rank, other=0.0).to(tl.float32)
    if pdl:
        gdc_wait()
    source = compressed + token * stride
    latent = tl.load(source + at, mask=at < rank, other=0.0).to(tl.float32)
    latent = latent * tl.rsqrt(tl.sum(latent * latent, axis=0) / rank + eps) * weight
    place = tl.arange(0, block_rope)
    in_rope = place < rope
    shared = tl.load(source + rank + place, mask=in_rope, other=0.0).to(tl.float32)
    shared = _rotated(shared, source + rank, place, cos_sin, token, in_rope, rope)
    row = rows + token * (rank + rope)
    tl.store(row + at, latent.to(rows.dtype.element_ty), mask=at < rank)
    tl.store(row + rank + place, shared.to(rows.dtype.element_ty), mask=in_rope)
    if writes_kv:
        if largest > 0:
            latent = tl.where(latent == latent, tl.minimum(tl.maximum(latent, -largest), largest), 0.0)
            shared = tl.where(shared == shared, tl.minimum(tl.maximum(shared, -largest), largest), 0.0)
        slot = kv_cache + tl.load(slot_mapping + token) * (rank + rope)
        tl.store(slot + at, latent.to(kv_cache.dtype.element_ty), mask=at < rank)
        tl.store(slot + rank + place, shared.to(kv_cache.dtype.element_ty), mask=in_rope)


def latent_rows(
    compressed: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows that latent attention caches, [n, rank + rope]: the latent divided by its root mean square and
    multiplied by `gain`, then the rotated part of the key.

    compressed: [n, rank + rope], of any row stride, its pairs interleaved. gain: [rank], in any float dtype. cos_sin:
    [n, rope] float32, cosine and sine of each pair interleaved. kv_cache: [num_blocks, block_size, rank + rope], of the
    dtype of `compressed`; row i goes to slot slot_mapping[i] = block_id * block_size + offset, [n] int64, clamped as
    `qk_norm_rope` does. Computed in float32 and rounded once.
    """
    n, width, rank, rope = *compressed.shape, len(gain), cos_sin.shape[1]
    assert width == rank + rope, (width, rank, rope)
    _check_angles(cos_sin, n, rope)
    assert compressed.stride(1) == 1
    assert gain.is_contiguous()
    rows = compressed.new_empty(n, width)
    if kv_cache is not None:
        assert slot_mapping is not None, "kv_cache needs slot_mapping"
        assert (slot_mapping.shape, slot_mapping.dtype) == ((n,), torch.int64), (slot_mapping.shape, slot_mapping.dtype)
        assert (kv_cache.shape[2], kv_cache.dtype) == (width, compressed.dtype), (kv_cache.shape, kv_cache.dtype)
        assert kv_cache.is_contiguous()
    if not n:
        return rows
    pdl, block_rank = supports_pdl(compressed.device), triton.next_power_of_2(rank)
    _latent_rows_kernel[(n,)](
        compressed,
        rows,
        gain,
        cos_sin,
        rows if kv_cache is None else kv_cache,
        rows if slot_mapping is None else slot_mapping,
        compressed.stride(0),
        eps,
        rank=rank,
        rope=rope,
        block_rank=block_rank,
        block_rope=triton.next_power_of_2(rope),
        writes_kv=kv_cache is not None,
        largest=_LARGEST_HALF if compressed.dtype == torch.float16 else 0.0,
        pdl=pdl,
        num_warps=min(8, max(1, block_rank // 256)),
        **launch_options(pdl),
    )
    return rows


def latent_rows_reference(
    compressed: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    kv_cache: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
) -> torch.Tensor:
    """`latent_rows` in plain torch."""
    rank = len(gain)
    latent, shared = compressed[:, :rank].float(), compressed[:, None, rank:].to(torch.float32, copy=True)
    latent = latent * torch.rsqrt(latent.square().mean(-1, keepdim=True) + eps) * gain.float()
    rotate_heads_reference(shared, cos_sin)
    rows = torch.cat((latent, shared[:, 0]), 1).to(compressed.dtype)
    if kv_cache is not None:
        assert slot_mapping is not None
        finite = torch.nan_to_num(rows) if rows.dtype == torch.float16 else rows
        kv_cache.flatten(0, 1)[slot_mapping] = finite
    return rows


@triton.jit
def _rotate_heads_kernel(
    x: tl.tensor,  # [n, num_heads, head_dim], of these strides
    cos_sin: tl.tensor,  # [n, head_dim] float32
    token_stride,
    head_stride: tl.constexpr,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    heads: tl.constexpr,  # of a program
    pairs: tl.constexpr,  # half of head_dim, rounded up to a power of two
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * heads + tl.arange(0, heads)[:, None]
    pair = tl.arange(0, pairs)[None, :]
    mask = (head < num_heads) & (pair < head_dim // 2)
    places = x + token * token_stride + head * head_stride + 2 * pair
    angle = cos_sin + token * head_dim + 2 * pair
    cos = tl.load(angle, mask=pair < head_dim // 2, other=0.0)
    sin = tl.load(angle + 1, mask=pair < head_dim // 2, other=0.0)
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(places, (first * cos - second * sin).to(x.dtype.element_ty), mask=mask)
    tl.store(places + 1, (second * cos + first * sin).to(x.dtype.element_ty), mask=mask)


def rotate_heads(x: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates x in place by each token's angles: [n, num_heads, head_dim], pairs interleaved, of any strides but the
    last, which is 1. cos_sin: [n, head_dim] float32, as for `latent_rows`."""
    n, num_heads, head_dim = x.shape
    _check_angles(cos_sin, n, head_dim)
    assert x.stride(2) == 1
    if not n:
        return
    pairs, pdl = triton.next_power_of_2(head_dim // 2), supports_pdl(x.device)
    heads = min(triton.next_power_of_2(num_heads), max(1, 512 // pairs))
    _rotate_heads_kernel[(n, triton.cdiv(num_heads, heads))](
        x,
        cos_sin,
        x.stride(0),
        head_stride=x.stride(1),
        num_heads=num_heads,
        head_dim=head_dim,
        heads=heads,
        pairs=pairs,
        pdl=pdl,
        num_warps=max(1, min(4, heads * pairs // 128)),
        **launch_options(pdl),
    )


def rotate_heads_reference(x: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """`rotate_heads` in plain torch."""
    n, heads, head_dim = x.shape
    pairs = torch.view_as_complex(x.float().contiguous().view(n, heads, head_dim // 2, 2))
    rotated = pairs * torch.view_as_complex(cos_sin.view(n, 1, head_dim // 2, 2))
    x.copy_(torch.view_as_real(rotated).flatten(2))


def _check_angles(cos_sin: torch.Tensor, n: int, head_dim: int) -> None:
    assert head_dim % 2 == 0, head_dim
    assert (cos_sin.shape, cos_sin.dtype) == ((n, head_dim), torch.float32), (cos_sin.shape, cos_sin.dtype)
    assert cos_sin.is_contiguous()
