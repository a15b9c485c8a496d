"""The experts of one token by FMA, of quantized matrices: the kernels of `experts_fma` for codes.

As there a program holds its codes in registers. What is done to a row, the norm and the rounding to FP8, every program
does: so programs are persistent, with several tiles of outputs.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import triton
import triton.language as tl

from ringcore.kernels.activation import gated
from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.linears.fma_row import load_gains, load_row
from ringcore.kernels.linears.packed_gemv import chunk_products, load_outputs, sums_of_both
from ringcore.kernels.linears.packed_weight import NIBBLE_CHUNK, PackedWeight
from ringcore.kernels.linears.skinny_times import NUM_SMS
from ringcore.kernels.linears.weight_tiles import tile_arguments
from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, ExpertWeight, Routing

__all__ = ["packed_down", "packed_gate", "takes_codes"]

_NUM_WARPS = 4
_MIN_BLOCK, _MAX_BLOCK = 128, 2048  # inputs that are multiplied together
_MAX_INPUTS = 16384  # a row of more does not fit in registers
_TILE_BYTES = 24 << 10  # of a program's codes that are loaded together
_MAX_OUTPUTS = 4  # of a tile
_GATE_PROGRAMS, _DOWN_PROGRAMS = 3 * NUM_SMS, 2 * NUM_SMS


@triton.jit(do_not_specialize=["first"])
def packed_expert_gate_kernel(
    x,  # [num_inputs]
    gain,  # [num_inputs], read where has_norm
    bias,  # [num_experts, 2 * num_outputs], read where has_bias
    experts,  # [k]
    rows,  # [k, num_outputs]
    first,  # int, the layer's index of the first expert
    eps,  # float
    weight,  # codes of [num_experts, 2 * num_outputs, num_inputs]
    packed,  # these two: see `weight_tiles.tile_arguments`
    layout: tl.constexpr,
    num_experts: tl.constexpr,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
    row_group: tl.constexpr,  # inputs that share a scale of x, which is rounded to FP8; 0: it is not
    is_exact: tl.constexpr,  # products of the weight are float32
    has_norm: tl.constexpr,
    has_bias: tl.constexpr,
    is_gelu: tl.constexpr,  # this and the next four: see `ExpertGate`
    alpha: tl.constexpr,
    limit: tl.constexpr,
    offset: tl.constexpr,
    is_interleaved: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program (i, j) computes tiles i, i + num_programs and so on of the outputs of the token's expert j; zeros of one
    that this rank does not have. The next kernel starts after the wait of this one, as in `experts_fma`."""
    step = tl.num_programs(0)
    num_tiles: tl.constexpr = (num_outputs + block_outputs - 1) // block_outputs
    index = tl.arange(0, block_outputs)
    targets = rows + tl.program_id(1) * num_outputs
    gains = ()
    if has_norm:
        gains = load_gains(gain, num_inputs, block_inputs, is_exact, layout)
    if pdl:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(experts + tl.program_id(1)).to(tl.int32) - first
    if (expert >= 0) & (expert < num_experts):
        base = expert * (2 * num_outputs)
        outputs = tl.program_id(0) * block_outputs + index
        loaded = _load_gate(
            weight, packed, base, outputs, num_outputs, num_inputs, block_inputs, is_interleaved, layout
        )
        row, squares = load_row(x, gains, num_inputs, block_inputs, row_group, is_exact, layout)
        factor = tl.rsqrt(squares / num_inputs + eps)
        for tile in tl.range(tl.program_id(0), num_tiles, step):
            outputs = tile * block_outputs + index
            following = _load_gate(
                *(weight, packed, base, outputs + step * block_outputs),
                num_outputs, num_inputs, block_inputs, is_interleaved, layout,
            )  # fmt: skip
            of_gate, of_up = _gate_rows(base, outputs, num_outputs, is_interleaved)
            gate = chunk_products(loaded, 0, row, packed, of_gate, num_inputs, block_inputs, is_exact, layout)
            up = chunk_products(
                loaded, len(loaded) // 2, row, packed, of_up, num_inputs, block_inputs, is_exact, layout
            )
            gate, up = sums_of_both(gate, up)
            if has_norm:
                gate, up = gate * factor, up * factor
            if has_bias:
                gate += tl.load(bias + of_gate).to(tl.float32)
                up += tl.load(bias + of_up).to(tl.float32)
            product = gated(gate, up, is_gelu, alpha, limit, offset)
            tl.store(targets + outputs, product.to(rows.dtype.element_ty), mask=outputs < num_outputs)
            loaded = following
    else:
        for tile in tl.range(tl.program_id(0), num_tiles, step):
            outputs = tile * block_outputs + index
            tl.store(targets + outputs, tl.zeros([block_outputs], rows.dtype.element_ty), mask=outputs < num_outputs)


@triton.jit
def _gate_rows(base, outputs, num_outputs: tl.constexpr, is_interleaved: tl.constexpr):
    """Of outputs, which are clamped to the last one, those of gate and up in the matrix of all experts."""
    clamped = tl.minimum(outputs, num_outputs - 1)
    if is_interleaved:
        of_gate = base + 2 * clamped
        of_up = of_gate + 1
    else:
        of_gate = base + clamped
        of_up = of_gate + num_outputs
    return of_gate, of_up


@triton.jit
def _load_gate(
    weight,
    packed,
    base,  # int, the expert's first row in the matrix of all experts
    outputs,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    is_interleaved: tl.constexpr,
    layout: tl.constexpr,
):
    """As `load_outputs`: those of the gate, then those of up."""
    of_gate, of_up = _gate_rows(base, outputs, num_outputs, is_interleaved)
    loaded = load_outputs(weight, packed, of_gate, of_gate, num_inputs, block_inputs, layout)
    return loaded + load_outputs(weight, packed, of_up, of_up, num_inputs, block_inputs, layout)


@triton.jit
def _load_down(
    weight,
    packed,
    bases,  # [block_k], of each expert its first row in the matrix of all experts
    first,  # int, the first output, clamped to the last one
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
    layout: tl.constexpr,
):
    """As `load_outputs`, of one output of all experts after the other."""
    loaded = ()
    for i in tl.static_range(block_outputs):
        output = tl.minimum(first + i, num_outputs - 1)
        rows = bases + output
        loaded += load_outputs(weight, packed, rows, rows, num_inputs, block_inputs, layout)
    return loaded


@triton.jit(do_not_specialize=["first"])
def packed_expert_down_kernel(
    rows,  # [k, num_inputs]; zeros of experts that this rank does not have
    bias,  # [num_experts, num_outputs], read where has_bias
    experts,  # [k]
    weights,  # [k]
    out,  # [num_outputs]
    first,  # int, the layer's index of the first expert
    weight,  # codes of [num_experts, num_outputs, num_inputs]
    packed,  # these two: see `weight_tiles.tile_arguments`
    layout: tl.constexpr,
    k: tl.constexpr,
    block_k: tl.constexpr,
    num_experts: tl.constexpr,
    num_outputs: tl.constexpr,
    num_inputs: tl.constexpr,
    block_inputs: tl.constexpr,
    block_outputs: tl.constexpr,
    row_group: tl.constexpr,  # see `packed_expert_gate_kernel`
    is_exact: tl.constexpr,
    has_bias: tl.constexpr,
    adds: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program i computes tiles i, i + num_programs and so on of the outputs. As in `experts_fma` the routing is read
    before the wait. An expert that this rank does not have is read as another one, and weighted by 0."""
    step = tl.num_programs(0) * block_outputs
    slots = tl.arange(0, block_k)
    in_bounds = tl.minimum(slots, k - 1)
    if pdl:
        gdc_launch_dependents()
    expert = tl.load(experts + in_bounds, cache_modifier=".cg").to(tl.int32) - first
    share = tl.load(weights + in_bounds, cache_modifier=".cg").to(tl.float32)
    share = tl.where((slots < k) & (expert >= 0) & (expert < num_experts), share, 0.0)
    bases = tl.minimum(tl.maximum(expert, 0), num_experts - 1) * num_outputs
    begin = tl.program_id(0) * block_outputs
    loaded = _load_down(weight, packed, bases, begin, num_outputs, num_inputs, block_inputs, block_outputs, layout)
    if pdl:
        gdc_wait()
    row, _ = load_row(
        rows + (in_bounds * num_inputs)[:, None], (), num_inputs, block_inputs, row_group, is_exact, layout
    )
    for at in tl.range(begin, num_outputs, step):
        following = _load_down(
            weight, packed, bases, at + step, num_outputs, num_inputs, block_inputs, block_outputs, layout
        )
        for i in tl.static_range(block_outputs):
            output = tl.minimum(at + i, num_outputs - 1)
            inputs = row, packed, bases + output
            products = chunk_products(
                loaded, i * (len(loaded) // block_outputs), *inputs, num_inputs, block_inputs, is_exact, layout
            )
            y = tl.sum(products, 1)
            if has_bias:
                y += tl.load(bias + bases + output).to(tl.float32)
            y = tl.sum(y * share, 0)
            if adds:
                y += tl.load(out + output).to(tl.float32)
            tl.store(
                out + output + tl.arange(0, 1), y.to(out.dtype.element_ty), mask=at + i + tl.arange(0, 1) < num_outputs
            )
        loaded = following


def takes_codes(weight: ExpertWeight) -> bool:
    """Whether these kernels multiply them: in chunks, each in one group, of rows that are not rounded, or here."""
    stored = weight.stored
    assert isinstance(stored, PackedWeight)
    num_inputs, row_bytes = stored.shape[1], stored.row_stride * stored.codes.element_size()
    are_vectors = num_inputs % NIBBLE_CHUNK == 0 and row_bytes % 16 == 0
    is_rounded = weight.row_group is not None or not weight.rounds_rows
    return stored.has_chunks and are_vectors and is_rounded and num_inputs <= _MAX_INPUTS


def packed_gate(
    x: torch.Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    gate: ExpertGate,
    norm: tuple[torch.Tensor, float] | None,
) -> torch.Tensor:
    """As of `experts_fma`: [k, size]."""
    num_experts, num_outputs, num_inputs = matrices.up.shape[0], matrices.up.shape[1] // 2, matrices.up.shape[2]
    rows = torch.empty(routing.k, num_outputs, dtype=matrices.up.dtype, device=x.device)
    gain, eps = (x, 0.0) if norm is None else norm
    tile = _tile(matrices.up, 2 * num_inputs)
    programs = min(triton.cdiv(num_outputs, tile["block_outputs"]), triton.cdiv(_GATE_PROGRAMS, routing.k))
    packed_expert_gate_kernel[(programs, routing.k)](
        *(x, gain, x if matrices.up_bias is None else matrices.up_bias, routing.experts, rows, matrices.first, eps),
        num_experts=num_experts,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        has_norm=norm is not None,
        has_bias=matrices.up_bias is not None,
        **asdict(gate),
        **tile,
    )
    return rows


def packed_down(rows: torch.Tensor, routing: Routing, matrices: ExpertMatrices, out: torch.Tensor, adds: bool) -> None:
    """rows: as of `packed_gate`; out [1, hidden_size]: the weighted sum over the experts, added where `adds`."""
    num_experts, num_outputs, num_inputs = matrices.down.shape
    block_k = triton.next_power_of_2(routing.k)
    tile = _tile(matrices.down, routing.k * num_inputs, block_k)
    packed_expert_down_kernel[(min(triton.cdiv(num_outputs, tile["block_outputs"]), _DOWN_PROGRAMS),)](
        *(rows, rows if matrices.down_bias is None else matrices.down_bias, routing.experts, routing.weights, out),
        matrices.first,
        k=routing.k,
        block_k=block_k,
        num_experts=num_experts,
        num_outputs=num_outputs,
        num_inputs=num_inputs,
        has_bias=matrices.down_bias is not None,
        adds=adds,
        **tile,
    )


def _tile(weight: ExpertWeight, num_codes: int, num_rows: int = 1) -> dict[str, Any]:
    """What both kernels take of a weight. num_codes: of one output of a program, in num_rows of the matrix."""
    stored, pdl = weight.stored, supports_pdl(weight.device)
    assert isinstance(stored, PackedWeight)
    block_inputs = min(_MAX_BLOCK // num_rows, triton.next_power_of_2(weight.shape[2]))
    outputs = int(_TILE_BYTES // (num_codes * stored.numbers.bytes))
    return {
        **tile_arguments(stored.as_words()),
        "block_inputs": max(_MIN_BLOCK, block_inputs),
        "block_outputs": 1 << (max(1, min(_MAX_OUTPUTS, outputs)).bit_length() - 1),
        "row_group": weight.row_group or 0,
        "is_exact": weight.dtype == torch.float32,
        "pdl": pdl,
        "num_warps": _NUM_WARPS,
        **launch_options(pdl),
    }
