"""The router of few tokens by FMA, with the norm before it as its prologue: see `router`.

A program multiplies one token by some experts, whose rows it holds in registers before it waits for the kernel before
it. The last one of a token that arrives chooses. Each of its warps has all logits, as tiles of 32, so that no reduction
goes through shared memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.mixtures.expert_matrices import RouterForm, Routing
from ringcore.kernels.reductions import add2

__all__ = ["MAX_INPUTS", "MAX_TOKENS", "choose", "route_few_tokens", "scores_of"]

MAX_INPUTS = 8192  # more rows of experts than one do not fit in registers
MAX_TOKENS = 64
_NUM_WARPS = 4
_TILE = 4  # experts of a program of one token
_MAX_TILE, _TILE_NUMBERS = 8, 1 << 14  # experts of one of several, and numbers in registers, at most
_LANES = tl.constexpr(32)  # logits of a tile
_CHOSEN = tl.constexpr(-(1 << 31))  # the key of an expert that is not chosen again, less than that of any number
_NO_NUMBER = tl.constexpr(-(1 << 31) + 1)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(numbers):
    """Integers in the order of float32 numbers; those that are none come last."""
    bits = numbers.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ _MAGNITUDE, bits)
    return tl.where(numbers == numbers, bits, _NO_NUMBER)


@triton.jit
def _largest(tiles):
    """Of a tuple of tiles [n]."""
    found = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        found = tl.maximum(found, tiles[i])
    return tl.max(found, 0)


@triton.jit
def _sum(tiles):
    total = tiles[0]
    for i in tl.static_range(1, len(tiles)):
        total += tiles[i]
    return tl.sum(total, 0)


@triton.jit
def scores_of(
    logits,  # [splits, num_experts], split_stride apart, which other programs wrote: partials
    split_stride,
    bias,
    num_experts: tl.constexpr,
    splits: tl.constexpr,
    is_sigmoid: tl.constexpr,
    rounds_to: tl.constexpr,  # dtype of the logits, or None
    has_bias: tl.constexpr,
):
    """Tiles of `_LANES` scores, 0 behind the last."""
    lane = tl.arange(0, _LANES)
    found = ()
    for at in tl.static_range(0, num_experts, _LANES):
        is_expert = lane < num_experts - at
        tile = tl.load(logits + at + lane, mask=is_expert, other=0.0, cache_modifier=".cg").to(tl.float32)
        for split in tl.static_range(1, splits):
            part = logits + split * split_stride + at + lane
            tile += tl.load(part, mask=is_expert, other=0.0, cache_modifier=".cg")
        if has_bias:
            tile += tl.load(bias + at + lane, mask=is_expert, other=0.0).to(tl.float32)
        if rounds_to is not None:
            tile = tile.to(rounds_to).to(tl.float32)
        found += (tl.where(is_expert, tile, -float("inf")),)
    scores = ()
    if is_sigmoid:
        for i in tl.static_range(len(found)):
            scores += (1.0 / (1.0 + tl.exp(-found[i])),)
    else:
        largest = _largest(found)
        powers = ()
        for i in tl.static_range(len(found)):
            powers += (tl.exp(found[i] - largest),)
        total = _sum(powers)
        for i in tl.static_range(len(found)):
            scores += (powers[i] / total,)
    return scores


@triton.jit
def choose(
    scores,  # see `scores_of`
    correction,
    experts,  # [k] int32
    weights,  # [k]
    num_experts: tl.constexpr,
    k: tl.constexpr,
    block_k: tl.constexpr,
    normalises: tl.constexpr,
    scale: tl.constexpr,
    is_corrected: tl.constexpr,
):
    """Stores the k largest, of equal ones the first."""
    lane = tl.arange(0, _LANES)
    place = tl.arange(0, block_k)
    keys = ()
    for i in tl.static_range(len(scores)):
        expert = i * _LANES + lane
        moved = scores[i]
        if is_corrected:
            moved += tl.load(correction + expert, mask=expert < num_experts, other=0.0).to(tl.float32)
        keys += (tl.where(expert < num_experts, _keys(moved), _CHOSEN),)
    chosen = tl.zeros([block_k], tl.int32)
    found = tl.zeros([block_k], tl.float32)
    for turn in tl.static_range(k):
        best = _largest(keys)
        places = ()
        for i in tl.static_range(len(keys)):  # negative, so that the first one is the largest
            places += (tl.where(keys[i] == best, -(i * _LANES + lane), -num_experts),)
        index = -_largest(places)
        left = ()
        own = ()
        for i in tl.static_range(len(keys)):
            is_best = i * _LANES + lane == index
            left += (tl.where(is_best, _CHOSEN, keys[i]),)
            own += (tl.where(is_best, scores[i], 0.0),)
        keys = left
        chosen = tl.where(place == turn, index, chosen)
        found = tl.where(place == turn, _sum(own), found)
    if normalises:
        found = found / tl.sum(found, 0)
    tl.store(experts + place, chosen, mask=place < k)
    tl.store(weights + place, (found * scale).to(weights.dtype.element_ty), mask=place < k)


@triton.jit
def router_row_kernel(
    x,  # [num_tokens, num_inputs]
    gain,  # [num_inputs], read where has_norm
    weight,  # [num_experts, num_inputs]
    bias,  # [num_experts], read where has_bias
    correction,  # [num_experts], read where is_corrected
    logits,  # [num_tokens, num_experts] float32
    experts,  # [num_tokens, k] int32
    weights,  # [num_tokens, k]
    normed,  # [num_tokens, num_inputs], written where stores_norm
    counters,  # [num_tokens] int32, 0, and 0 again afterwards
    eps,  # float
    num_experts: tl.constexpr,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    k: tl.constexpr,
    block_k: tl.constexpr,
    block_tile: tl.constexpr,  # experts of one program
    has_norm: tl.constexpr,
    stores_norm: tl.constexpr,
    normalises: tl.constexpr,  # this and the next three: see `RouterForm`
    is_sigmoid: tl.constexpr,
    rounds_logits: tl.constexpr,
    scale: tl.constexpr,
    has_bias: tl.constexpr,
    is_corrected: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program (i, j) multiplies token j by experts tile i."""
    token = tl.program_id(1)
    expert = tl.program_id(0) * block_tile + tl.arange(0, block_tile)
    columns = tl.arange(0, block_inputs)[None, :]
    if pdl:
        gdc_launch_dependents()
    matrix = weight + tl.minimum(expert, num_experts - 1)[:, None] * num_inputs + columns
    w = tl.load(matrix, mask=columns < num_inputs, other=0.0)
    if has_norm:
        factor = tl.load(gain + columns, mask=columns < num_inputs, other=0.0).to(tl.float32)
    if pdl:
        gdc_wait()
    v = tl.load(x + token * num_inputs + columns, mask=columns < num_inputs, other=0.0).to(tl.float32)
    if has_norm:
        squares = tl.broadcast_to(v * v, [block_tile, block_inputs])
        v *= factor
        sums, total = tl.reduce((w.to(tl.float32) * v, squares), 1, add2)
        scales = tl.rsqrt(total / num_inputs + eps)
        sums *= scales
        if stores_norm and tl.program_id(0) == 0:
            rounded = v * (tl.sum(scales, 0) / block_tile)  # of equal ones
            targets = normed + token * num_inputs + columns
            tl.store(targets, rounded.to(normed.dtype.element_ty), mask=columns < num_inputs)
    else:
        sums = tl.sum(w.to(tl.float32) * v, 1)
    own = logits + token * num_experts
    tl.store(own + expert, sums, mask=expert < num_experts)
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + token, 1, sem="acq_rel", scope="gpu")
    if arrived == tl.num_programs(0) - 1:
        rounds_to: tl.constexpr = weight.dtype.element_ty if rounds_logits else None
        scores = scores_of(own, 0, bias, num_experts, 1, is_sigmoid, rounds_to, has_bias)
        pairs = token * k
        choose(
            *(scores, correction, experts + pairs, weights + pairs),
            num_experts, k, block_k, normalises, scale, is_corrected,
        )  # fmt: skip
        tl.store(counters + token, 0)


def route_few_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    form: RouterForm,
    dtype: torch.dtype,
    *,
    counters: torch.Tensor,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    normed: torch.Tensor | None = None,
) -> Routing:
    """As `router.route` of up to `MAX_TOKENS` rows x [n, num_inputs], with a norm of any float dtype, of up to
    `MAX_INPUTS` inputs. dtype: of the weights of the experts."""
    (num_tokens, num_inputs), num_experts = x.shape, len(weight)
    assert num_inputs <= MAX_INPUTS, num_inputs
    assert num_tokens <= len(counters), (num_tokens, counters.shape)
    logits = torch.empty(num_tokens, num_experts, dtype=torch.float32, device=x.device)
    experts = torch.empty(num_tokens, form.k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, form.k, dtype=dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    block_inputs, pdl = triton.next_power_of_2(num_inputs), supports_pdl(x.device)
    tile = _TILE if num_tokens == 1 else max(1, min(_MAX_TILE, _TILE_NUMBERS // block_inputs))
    router_row_kernel[(triton.cdiv(num_experts, tile), num_tokens)](
        *(x, gain, weight, weight if bias is None else bias, weight if correction is None else correction),
        *(logits, experts, weights, logits if normed is None else normed, counters, eps),
        num_experts=num_experts,
        num_inputs=num_inputs,
        block_inputs=block_inputs,
        k=form.k,
        block_k=triton.next_power_of_2(form.k),
        block_tile=tile,
        has_norm=norm is not None,
        stores_norm=normed is not None,
        normalises=form.normalises,
        is_sigmoid=form.is_sigmoid,
        rounds_logits=form.rounds_logits,
        scale=form.scale,
        has_bias=bias is not None,
        is_corrected=correction is not None,
        pdl=pdl,
        num_warps=_NUM_WARPS,
        **launch_options(pdl),
    )
    return Routing(experts, weights)
