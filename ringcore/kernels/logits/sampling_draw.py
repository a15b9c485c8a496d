"""Primitives of a draw, on the device: weights of logits, the counter-based RNG of a row, one token of a group.

The numbers are those of `ringcore.model_executor.sampler`: its RNG, its two levels, its groups. A weight is exp(logit /
temperature - the row's maximum) in float32 with the same roundings, except that of exp: within an ulp or two.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

__all__ = ["Row", "draw_member", "exp_of", "exponentials", "read_logits", "scaled", "weights_at"]


class Row(NamedTuple):
    """One row, inside a kernel: scalars and pointers."""

    logits: tl.tensor  # pointer to its first
    temperature: tl.tensor
    scaled_best: tl.tensor  # its largest logit, scaled
    seed: tl.tensor
    position: tl.tensor
    masked_token_ids: tl.tensor  # pointer; the ids from first_masked to end_masked may not be sampled
    first_masked: tl.tensor
    end_masked: tl.tensor
    vocab_size: tl.tensor
    num_groups: tl.tensor


@triton.jit
def read_logits(
    logits: tl.tensor,
    columns: tl.tensor,  # int32, any shape
    mask: tl.tensor,
    masked_token_ids: tl.tensor,
    first_masked: tl.tensor,
    end_masked: tl.tensor,
) -> tl.tensor:
    """float32; -inf where masked or out of bounds."""
    x = tl.load(logits + columns, mask=mask, other=-float("inf")).to(tl.float32)
    for i in range(first_masked, end_masked):
        x = tl.where(columns == tl.load(masked_token_ids + i), -float("inf"), x)
    return x


@triton.jit
def scaled(x: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """The quotient with IEEE 754 rounding; Triton's `/` is an approximation."""
    return tl.div_rn(x, temperature)


@triton.jit
def exp_of(d: tl.tensor) -> tl.tensor:
    """exp of float32 d <= 0, exactly 1 at 0; 0 at and below -87, near the smallest normal number, and for NaN.

    Near 0 it is correctly rounded. The hardware's exp2 is not: it would round apart the weights of nearly equal logits
    that are equal as floats, and a filter that keeps ties would keep others. Polynomial: expf of Cephes (Moshier).
    """
    x = tl.minimum(tl.maximum(d, -87.0), 0.0)
    k = tl.floor(x * 1.4426950408889634 + 0.5)
    # ln 2 in two parts; the product of k and the first one is exact.
    r = x - k * 0.693359375
    r = r + k * 2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    y = p * (r * r) + r + 1.0
    power = ((k.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(d > -87.0, y * power, 0.0)


@triton.jit
def weights_at(row: Row, columns: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """In [0, 1], the best token's being 1; any shape. 0 where masked or out of bounds."""
    x = read_logits(row.logits, columns, mask, row.masked_token_ids, row.first_masked, row.end_masked)
    return exp_of(scaled(x, row.temperature) - row.scaled_best)


@triton.jit
def exponentials(seed: tl.tensor, position: tl.tensor, columns: tl.tensor) -> tl.tensor:
    """float64, exponentially distributed: -log of the sampler's `uniforms` in these columns (int32).

    Philox-4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) with the seed as its key and (column // 4, position) as its
    counter; column % 4 is the word of its output. In float64, since in float32 a number near 1 would be 1 and its
    logarithm 0; a row needs only about 2 * sqrt(vocab_size) of them.
    """
    counter = columns // 4
    zero = counter * 0
    low = (position & 0xFFFFFFFF).to(tl.int32) + zero
    high = (position >> 32).to(tl.int32) + zero
    a, b, c, d = tl.philox(seed, counter, low, high, zero)
    place = columns % 4
    word = tl.where(place == 0, a, tl.where(place == 1, b, tl.where(place == 2, c, d)))
    return -tl.log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10)


@triton.jit
def draw_member(row: Row, winner: tl.tensor, threshold: tl.tensor, group: tl.constexpr) -> tl.tensor:
    """The second level: one token of the group `winner`, among those whose weights reach the threshold."""
    members = tl.arange(0, group)
    columns = winner * group + members
    weights = weights_at(row, columns, columns < row.vocab_size)
    weights = tl.where(weights >= threshold, weights, 0.0)
    score = exponentials(row.seed, row.position, row.num_groups + members)
    return winner * group + tl.argmax(weights.to(tl.float64) / score, axis=0)
