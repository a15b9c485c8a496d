"""top_k, top_p and min_p of a row without a sort: a search for the smallest weight that they keep.

The bits of positive floats have the order of the floats, so a threshold is bisected over its bits. Three things keep
this from reading the whole row thirty times: the maximum and the sum of every group of neighbouring tokens give a lower
bound of the threshold; only groups whose maximum reaches the bound are read at all; and the weights above the bound are
compacted and searched in registers as soon as they are few enough, mostly at once; a row of very many likely tokens is
halved by whole passes until they are.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from ringcore.kernels.logits.sampling_draw import Row, weights_at

__all__ = ["Filters", "Groups", "filter_threshold", "first_bound", "listed_weights"]

_ABOVE_ONE = tl.constexpr(0x3F800001)  # the bits of the float after 1: no weight reaches it
# Relative slack of a bound, so that no rounding of exp or of a sum puts it above what it bounds.
_SLACK = tl.constexpr(1e-5)


class Filters(NamedTuple):
    """The filters of a row, inside a kernel."""

    top_k: tl.tensor  # int32; 0 keeps all
    top_p: tl.tensor
    min_p: tl.tensor


class Groups(NamedTuple):
    """The groups of a row that may hold a kept token, inside a kernel."""

    ids: tl.tensor  # pointer to num_ids of them, ascending
    num_ids: tl.tensor
    candidates: tl.tensor  # pointer to scratch for `capacity` weights


@triton.jit
def _bits(weights: tl.tensor) -> tl.tensor:
    return weights.to(tl.int32, bitcast=True)


@triton.jit
def _bisect(bits: tl.tensor, amounts: tl.tensor, base: tl.tensor, need: tl.tensor, low: tl.tensor, high: tl.tensor):
    """The largest bound in [low, high) such that base and the amounts at or above it add up to `need` (float64), and
    the bound after it. Precondition: `low` reaches it, `high` does not."""
    while high - low > 1:
        middle = low + (high - low) // 2
        if base + tl.sum(tl.where(bits >= middle, amounts, 0.0), axis=0) >= need:
            low = middle
        else:
            high = middle
    return low, high


@triton.jit
def first_bound(
    maxima: tl.tensor,  # [group_block]: the largest weight of each group, 0 after the last
    masses: tl.tensor,  # [group_block]: the sums of their weights
    total: tl.tensor,  # float64: the sum of all weights
    filters: Filters,
    num_groups: tl.tensor,
    group: tl.constexpr,
) -> tl.tensor:
    """A lower bound of the threshold, from the groups' maxima and sums; 0 if they give none."""
    bound = filters.min_p * 0.0
    if filters.top_k > 0:
        if filters.top_k <= num_groups:
            # The k-th largest of the groups' best tokens: at least k tokens are as likely.
            need = filters.top_k.to(tl.float64)
            zero = filters.top_k * 0
            ones = (maxima * 0.0 + 1.0).to(tl.float64)
            found, _ = _bisect(_bits(maxima), ones, need * 0.0, need, zero, zero + _ABOVE_ONE)
            bound = found.to(tl.float32, bitcast=True)
    elif filters.top_p < 1:
        # Dropping weights below a level loses at most `group` times the level per group, and no more than its sum.
        levels = tl.exp2(-tl.arange(0, 32).to(tl.float32))
        lost = tl.sum(tl.minimum(masses[None, :], (levels * group)[:, None]), axis=1)
        may_lose = (1.0 - filters.top_p.to(tl.float64) - 2e-6) * total
        bound = tl.max(tl.where(lost.to(tl.float64) <= may_lose, levels, 0.0), axis=0)
    if (filters.top_k == 0) | (filters.top_p >= 1):
        bound = tl.maximum(bound, filters.min_p)  # with both, top_p needs the sum of all tokens that top_k keeps
    return bound * (1.0 - _SLACK)


@triton.jit
def listed_weights(row: Row, groups: Groups, start: tl.tensor, group: tl.constexpr, tile: tl.constexpr):
    """[tile, group] weights of the groups listed from `start` on, and the [tile] groups; -1 and 0 after the last."""
    slots = start + tl.arange(0, tile)
    ids = tl.load(groups.ids + slots, mask=slots < groups.num_ids, other=-1)
    columns = ids[:, None] * group + tl.arange(0, group)[None, :]
    return weights_at(row, columns, (ids >= 0)[:, None] & (columns < row.vocab_size)), ids


@triton.jit
def _collect(
    row: Row,
    groups: Groups,
    low: tl.tensor,
    middle: tl.tensor,  # above 0
    high: tl.tensor,
    group: tl.constexpr,
    tile: tl.constexpr,
    capacity: tl.constexpr,
):
    """Compacts the weights strictly between the bounds `low` and `high` into `candidates`, up to its capacity. Returns
    their number; and how many weights reach `middle`, and their sum, both float64."""
    num_inside = low * 0
    count = tl.full([], 0.0, tl.float64)
    mass = tl.full([], 0.0, tl.float64)
    tl.debug_barrier()  # threads may still read the previous candidates
    for start in range(0, groups.num_ids, tile):
        weights, _ = listed_weights(row, groups, start, group, tile)
        reaches = _bits(weights) >= middle
        count += tl.sum(tl.sum(reaches.to(tl.int32), axis=1), axis=0).to(tl.float64)
        mass += tl.sum(tl.sum(tl.where(reaches, weights, 0.0), axis=1).to(tl.float64), axis=0)
        flat = tl.reshape(weights, [tile * group])
        is_inside = (_bits(flat) > low) & (_bits(flat) < high)
        places = num_inside + tl.cumsum(is_inside.to(tl.int32), axis=0) - 1
        tl.store(groups.candidates + places, flat, mask=is_inside & (places < capacity))
        num_inside += tl.sum(is_inside.to(tl.int32), axis=0)
    tl.debug_barrier()
    return num_inside, count, mass


@triton.jit
def _search(
    row: Row,
    groups: Groups,
    need: tl.tensor,
    low: tl.tensor,
    by_mass: tl.tensor,  # bool
    group: tl.constexpr,
    tile: tl.constexpr,
    capacity: tl.constexpr,
):
    """The bits of the largest weight such that the weights that reach it are `need` in number, or by mass add up to it;
    and the number and the sum of the weights above. Precondition: `low` reaches it. need: float64.

    One loop with a single read of the weights in it, without a peeled first iteration: every occurrence of the read is
    compiled again.
    """
    high = low * 0 + _ABOVE_ONE
    count_above = tl.full([], 0.0, tl.float64)
    mass_above = tl.full([], 0.0, tl.float64)
    num_inside = low * 0 + (capacity + 1)
    while (num_inside > capacity) & (high - low > 1):
        middle = low + (high - low) // 2
        num_inside, count, mass = _collect(row, groups, low, middle, high, group, tile, capacity)
        if num_inside > capacity:
            if tl.where(by_mass, mass, count) >= need:
                low = middle
            else:
                high = middle
                count_above = count
                mass_above = mass
    num_inside = tl.where(high - low > 1, num_inside, 0)  # the bounds met: there are no candidates
    slots = tl.arange(0, capacity)
    weights = tl.load(groups.candidates + slots, mask=slots < num_inside, other=0.0)
    bits = _bits(weights)
    masses = weights.to(tl.float64)
    amounts = tl.where(by_mass, masses, 1.0)
    low, high = _bisect(bits, amounts, tl.where(by_mass, mass_above, count_above), need, low, high)
    count_above += tl.sum((bits >= high).to(tl.int32), axis=0).to(tl.float64)
    mass_above += tl.sum(tl.where(bits >= high, masses, 0.0), axis=0)
    return low, count_above, mass_above


@triton.jit
def filter_threshold(
    row: Row,
    groups: Groups,
    filters: Filters,
    bound: tl.tensor,
    total: tl.tensor,
    group: tl.constexpr,
    tile: tl.constexpr,  # groups per iteration
    capacity: tl.constexpr,  # candidates held in registers
) -> tl.tensor:
    """The smallest weight that the filters keep: each keeps what is at or above a threshold, and this is the highest of
    them.

    bound: that of `first_bound`. total: float64, the sum of all weights.
    """
    threshold = filters.min_p
    if (filters.top_k > 0) | (filters.top_p < 1):
        low = _bits(bound)
        p = filters.top_p.to(tl.float64)
        k = filters.top_k.to(tl.float64)
        need = tl.where(filters.top_k > 0, k, p * total)
        # top_k's search, then top_p's; in one loop, so that the search is compiled once.
        for phase in range(tl.where(filters.top_k > 0, 0, 1), tl.where(p < 1, 2, 1)):
            low, count_above, mass_above = _search(row, groups, need, low, phase == 1, group, tile, capacity)
            # Of the tokens that tie with the k-th one, only as many count as make k.
            need = p * (mass_above + (k - count_above) * low.to(tl.float32, bitcast=True).to(tl.float64))
        threshold = tl.maximum(threshold, low.to(tl.float32, bitcast=True))
    return threshold
