"""The online softmax of a warp's 16 tokens in `warp_split_decode`: of 16-bit keys and values, and of FP8 codes.

Scores are [num_warps, WARP_TOKENS, rows], a row a query head; the weighted sum of values has the numbers of a head as
its rows. In FP8 codes are multiplied as float16, and powers of 2 scale scores and weights (`fp8_kv`). A register of
the transposed values has two tokens, so words of two codes are loaded, and the sum is of even and of odd numbers apart.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ringcore.kernels.attention.attention_tile import MASK_VALUE, capped
from ringcore.kernels.attention.fp8_kv import PAIRS_TO_HALVES
from ringcore.kernels.attention.warp_split_combine import largest

__all__ = ["attend_codes", "attend_numbers", "by_head", "code_factor", "no_values", "power_of_2"]


@gluon.constexpr_function
def code_factor(summed, index):
    """The layout of a factor of a product over the numbers of a head, whose keys are codes: four are a word."""
    return gl.DotOperandLayout(index, summed, 4)


@gluon.jit
def power_of_2(exponents):
    """`packed_math.power_of_2`."""
    return (exponents << 23).to(gl.float32, bitcast=True)


@gluon.jit
def no_values(
    num_warps: gl.constexpr, head_size: gl.constexpr, rows: gl.constexpr, is_fp8: gl.constexpr, summed: gl.constexpr
):
    """The weighted sum of no values, as `attend_numbers` and `attend_codes` have it."""
    if is_fp8:
        half = gl.zeros([num_warps, head_size // 2, rows], gl.float32, summed)
        acc = gl.join(half, half)
    else:
        acc = gl.zeros([num_warps, head_size, rows], gl.float32, summed)
    return acc


@gluon.jit
def by_head(acc):
    """A weighted sum as [num_warps, rows, head_size]."""
    if len(acc.shape) == 4:
        acc = gl.reshape(gl.permute(acc, (0, 2, 1, 3)), [acc.shape[0], acc.shape[2], 2 * acc.shape[1]])
    else:
        acc = gl.permute(acc, (0, 2, 1))
    return acc


@gluon.jit
def _weights(scores, visible, warp_max, warp_sum):
    """-> the weights, by what earlier ones are multiplied, and the new warp_max and warp_sum."""
    scores = gl.where(gl.expand_dims(visible, 2), scores, MASK_VALUE)
    new_max = gl.maximum(warp_max, gl.reduce(scores, 1, largest))
    weights = gl.exp2(scores - gl.expand_dims(new_max, 1))
    rescale = gl.expand_dims(gl.exp2(warp_max - new_max), 1)
    return weights, rescale, new_max, warp_sum * rescale + weights


@gluon.jit
def attend_numbers(keys, values, factors, visible, warp_max, warp_sum, acc, scale_log2, softcap_log2):
    """keys, values: shared memory [num_warps, WARP_TOKENS, head_size]. factors: the queries, [num_warps, head_size,
    rows]. visible: [num_warps, WARP_TOKENS]. -> warp_max, warp_sum and acc, updated."""
    summed: gl.constexpr = acc.type.layout
    first_factor: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    second_factor: gl.constexpr = gl.DotOperandLayout(1, summed, 2)
    scores = mma_v2(keys.load(first_factor), factors, gl.zeros(warp_sum.shape, gl.float32, summed))
    scores = scores * scale_log2 if softcap_log2 is None else capped(scores, scale_log2, softcap_log2)
    weights, rescale, warp_max, warp_sum = _weights(scores, visible, warp_max, warp_sum)
    value = values.permute((0, 2, 1)).load(first_factor)
    weights = gl.convert_layout(weights.to(factors.dtype), second_factor)
    return warp_max, warp_sum, mma_v2(value, weights, acc * rescale)


@gluon.jit
def attend_codes(
    keys, values, key_exponents, value_exponents, factors, visible, warp_max, warp_sum, acc, scale_log2, softcap_log2
):
    """`attend_numbers` of codes. keys: shared memory [num_warps, WARP_TOKENS, head_size] uint8. values: of two codes a
    number, [num_warps, WARP_TOKENS, head_size / 2] int16. Exponents: shared memory [num_warps, WARP_TOKENS] uint8.
    factors: float16."""
    summed: gl.constexpr = warp_sum.type.layout
    first_factor: gl.constexpr = gl.DotOperandLayout(0, summed, 2)
    second_factor: gl.constexpr = gl.DotOperandLayout(1, summed, 2)
    of_tokens: gl.constexpr = gl.SliceLayout(2, summed)
    key = keys.load(code_factor(summed, 0)).to(gl.float8e4nv, bitcast=True).to(gl.float16)
    scores = mma_v2(key, factors, gl.zeros(warp_sum.shape, gl.float32, summed))
    powers = power_of_2(key_exponents.load(of_tokens).to(gl.int32)) * scale_log2
    scores = scores * gl.expand_dims(powers, 2)
    if softcap_log2 is not None:
        scores = capped(scores, 1.0, softcap_log2)
    weights, rescale, warp_max, warp_sum = _weights(scores, visible, warp_max, warp_sum)
    exponents = gl.where(visible, value_exponents.load(of_tokens).to(gl.int32), 0)
    most = gl.reduce(exponents, 1, largest)
    relative = power_of_2(gl.maximum(127 + exponents - gl.expand_dims(most, 1), 0))  # from 1 down
    weights = gl.convert_layout((weights * gl.expand_dims(relative, 2)).to(gl.float16), second_factor)
    pairs = values.permute((0, 2, 1)).load(first_factor)
    even, odd = gl.inline_asm_elementwise(
        PAIRS_TO_HALVES, "=&r,=&r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )
    half: gl.constexpr = [acc.shape[0], acc.shape[1], acc.shape[2]]
    even = mma_v2(even, weights, gl.zeros(half, gl.float32, summed))
    odd = mma_v2(odd, weights, gl.zeros(half, gl.float32, summed))
    power = gl.expand_dims(gl.expand_dims(power_of_2(most), 1), 2)
    even_acc, odd_acc = gl.split(acc)
    even_acc = gl.convert_layout(even_acc, summed, assert_trivial=True)
    odd_acc = gl.convert_layout(odd_acc, summed, assert_trivial=True)
    return warp_max, warp_sum, gl.join(even_acc * rescale + even * power, odd_acc * rescale + odd * power)
