"""The experts of one token by FMA (a GEMV for each expert), with the norm before them as a prologue.

A tile for tensor cores would be mostly empty. Two launches: gate and up with the activation, a program an expert of the
token and tile of outputs; down with the weighted sum over the experts, a program an output, so that no program waits
for another. Each holds its weights in registers, which are loaded at once. Of quantized weights: `packed_experts_fma`.
"""

from __future__ import annotations

from dataclasses import asdict

import torch
import triton
import triton.language as tl

from ringcore.kernels.activation import gated
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.linears.tile_load import load_tile, load_weights
from ringcore.kernels.mixtures.expert_matrices import Activate, ExpertGate, ExpertMatrices, Routing
from ringcore.kernels.mixtures.packed_experts_fma import packed_down, packed_gate, takes_codes
from ringcore.kernels.reductions import add2, add3

__all__ = ["experts_of_one_token", "takes_one_token"]

_NUM_WARPS = 4
_GATE_INPUTS = _DOWN_NUMBERS = 1024  # that are loaded together, 8 by a thread
_MAX_DOWN_NUMBERS = 1 << 15  # of an output, over all experts of a token: what registers hold


@triton.jit(do_not_specialize=["first"])
def expert_gate_kernel(
    x,  # [num_inputs]
    gain,  # [num_inputs], read where has_norm
    weight,  # [num_experts, 2 * num_outputs, num_inputs]
    bias,  # [num_experts, 2 * num_outputs], read where has_bias
    experts,  # [k]
    rows,  # [k, num_outputs]
    first,  # int, the layer's index of the first expert
    eps,  # float
    num_experts: tl.constexpr,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_gelu: tl.constexpr,  # this and the next four: see `ExpertGate`
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    is_interleaved: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program (i, j) computes output i of the token's expert j. The next kernel starts after the wait of this one, so
    that it may read the routing before its own."""
    is_whole: tl.constexpr = num_inputs % block_inputs == 0
    gate_row = tl.program_id(0) * (2 if is_interleaved else 1)
    to_up: tl.constexpr = 1 if is_interleaved else num_outputs
    columns = tl.arange(0, block_inputs)[None, :]
    if has_norm:
        g = load_tile(gain + columns, columns < num_inputs, is_whole)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts + tl.program_id(1)).to(tl.int32) - first
    if (expert >= 0) & (expert < num_experts):
        tile = weight + expert.to(tl.int64) * (2 * num_outputs * num_inputs) + gate_row * num_inputs + columns
        y = tl.zeros([1, block_inputs], tl.float32)
        z = tl.zeros([1, block_inputs], tl.float32)
        squares = tl.zeros([1, block_inputs], tl.float32)
        for at in tl.static_range(0, num_inputs, block_inputs):
            in_bounds = columns + at < num_inputs
            w = load_weights(tile + at, in_bounds, is_whole)
            u = load_weights(tile + to_up * num_inputs + at, in_bounds, is_whole)
            v = load_tile(x + columns + at, in_bounds, is_whole).to(tl.float32)
            if has_norm:
                squares += v * v
                if at > 0:
                    g = load_tile(gain + columns + at, in_bounds, is_whole)
                v *= g.to(tl.float32)
            y += w.to(tl.float32) * v
            z += u.to(tl.float32) * v
        if has_norm:
            gate, up, total = tl.reduce((y, z, squares), 1, add3)
            scale = tl.rsqrt(total / num_inputs + eps)
            gate, up = gate * scale, up * scale
        else:
            gate, up = tl.reduce((y, z), 1, add2)
        if has_bias:
            biases = bias + expert * (2 * num_outputs) + gate_row
            gate += tl.load(biases).to(tl.float32)
            up += tl.load(biases + to_up).to(tl.float32)
        product = gated(gate, up, is_gelu, alpha, limit, offset)
        target = rows + tl.program_id(1) * num_outputs + tl.program_id(0) + tl.arange(0, 1)
        tl.store(target, product.to(rows.dtype.element_ty))


@triton.jit(do_not_specialize=["first"])
def expert_down_kernel(
    rows,  # [k, num_inputs]
    weight,  # [num_experts, num_outputs, num_inputs]
    bias,  # [num_experts, num_outputs], read where has_bias
    experts,  # [k]
    weights,  # [k]
    out,  # [num_outputs]
    first,  # int, the layer's index of the first expert
    k: tl.constexpr,
    block_k: tl.constexpr,
    num_experts: tl.constexpr,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program i computes output i. The routing is read before the wait: `expert_gate_kernel`, which is launched before
    this kernel, has waited for it. Past the L1 cache, in which that of another layer may be."""
    is_whole: tl.constexpr = num_inputs % block_inputs == 0
    output = tl.program_id(0)
    slots = tl.arange(0, block_k)
    columns = tl.arange(0, block_inputs)[None, :]
    if pdl:
        gdc_launch_dependents()
    expert = tl.load(experts + slots, mask=slots < k, other=-1, cache_modifier=".cg").to(tl.int32) - first
    is_here = (slots < k) & (expert >= 0) & (expert < num_experts)
    share = tl.load(weights + slots, mask=is_here, other=0.0, cache_modifier=".cg").to(tl.float32)
    matrix = weight + (expert.to(tl.int64) * (num_outputs * num_inputs) + output * num_inputs)[:, None] + columns
    tiles = ()
    for at in tl.static_range(0, num_inputs, block_inputs):
        in_bounds = is_here[:, None]
        if not is_whole:
            in_bounds &= columns + at < num_inputs
        tiles += (load_weights(matrix + at, in_bounds, False),)
    if pdl:
        gdc_wait()
    total = tl.zeros([block_k, block_inputs], tl.float32)
    for i in tl.static_range(len(tiles)):
        places = columns + i * block_inputs
        in_bounds = is_here[:, None]
        if not is_whole:
            in_bounds &= places < num_inputs
        v = tl.load(rows + (slots * num_inputs)[:, None] + places, mask=in_bounds, other=0.0)
        total += tiles[i].to(tl.float32) * v.to(tl.float32)
    if adds:
        before = tl.load(out + output).to(tl.float32)
    sums = tl.sum(total, 1)  # [block_k]
    if has_bias:
        sums += tl.load(bias + expert * num_outputs + output, mask=is_here, other=0.0).to(tl.float32)
    y = tl.sum(sums * share, 0)
    if adds:
        y += before
    tl.store(out + output, y.to(out.dtype.element_ty))


def takes_one_token(matrices: ExpertMatrices, activate: Activate, normalise: Activate | None) -> bool:
    """Whether `experts_of_one_token` computes these: with a known gate, no norm, and a row an output."""
    up, down = matrices.up, matrices.down
    if not isinstance(activate, ExpertGate) or normalise is not None:
        return False
    if isinstance(up.stored, PackedWeight):
        return takes_codes(up) and takes_codes(down)
    down_numbers = triton.cdiv(down.shape[2], _DOWN_NUMBERS) * _DOWN_NUMBERS
    return not up.is_transposed and not down.is_transposed and down_numbers <= _MAX_DOWN_NUMBERS


def experts_of_one_token(
    x: torch.Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    gate: ExpertGate,
    out: torch.Tensor,
    *,
    adds: bool,
    norm: tuple[torch.Tensor, float] | None = None,
) -> torch.Tensor:
    """As `experts.experts` of one token and matrices that `takes_one_token`: out [1, hidden_size], or what it has with
    the sum added.

    x: [1, hidden_size] of the matrices' dtype. norm: gain [hidden_size] and eps; x is then of any float dtype, and not
    rounded after the norm.
    """
    hidden_size = matrices.down.shape[1]
    assert x.shape == out.shape == (1, hidden_size), (x.shape, out.shape, hidden_size)
    assert norm is not None or x.dtype == matrices.up.dtype, (x.dtype, matrices.up.dtype)
    for tensor in (x, matrices.up.stored, matrices.down.stored, routing.experts, routing.weights, out):
        assert not isinstance(tensor, torch.Tensor) or tensor.is_contiguous(), "tensors must be contiguous"
    is_packed = isinstance(matrices.up.stored, PackedWeight)
    launch_gate, launch_down = (packed_gate, packed_down) if is_packed else (_gate, _down)
    launch_down(launch_gate(x, routing, matrices, gate, norm), routing, matrices, out, adds)
    return out


def _gate(
    x: torch.Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    gate: ExpertGate,
    norm: tuple[torch.Tensor, float] | None,
) -> torch.Tensor:
    """[k, size]"""
    up, bias, pdl = matrices.up.stored, matrices.up_bias, supports_pdl(x.device)
    num_experts, num_weights, num_inputs = matrices.up.shape
    rows = torch.empty(routing.k, num_weights // 2, dtype=matrices.up.dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    expert_gate_kernel[(num_weights // 2, routing.k)](
        *(x, gain, up, up if bias is None else bias, routing.experts, rows, matrices.first, eps),
        num_experts=num_experts,
        num_outputs=num_weights // 2,
        num_inputs=num_inputs,
        block_inputs=min(_GATE_INPUTS, triton.next_power_of_2(num_inputs)),
        has_norm=norm is not None,
        has_bias=bias is not None,
        **asdict(gate),
        pdl=pdl,
        num_warps=_NUM_WARPS,
        **launch_options(pdl),
    )
    return rows


def _down(rows: torch.Tensor, routing: Routing, matrices: ExpertMatrices, out: torch.Tensor, adds: bool) -> None:
    down, bias, pdl = matrices.down.stored, matrices.down_bias, supports_pdl(rows.device)
    num_experts, num_outputs, num_inputs = matrices.down.shape
    block_k = triton.next_power_of_2(routing.k)
    expert_down_kernel[(num_outputs,)](
        *(rows, down, down if bias is None else bias, routing.experts, routing.weights, out, matrices.first),
        k=routing.k,
        block_k=block_k,
        num_experts=num_experts,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        block_inputs=min(max(1, _DOWN_NUMBERS // block_k), triton.next_power_of_2(num_inputs)),
        has_bias=bias is not None,
        adds=adds,
        pdl=pdl,
        num_warps=_NUM_WARPS,
        **launch_options(pdl),
    )
