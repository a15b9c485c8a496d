"""Samples one token per row of logits, on the device: two kernels whatever the rows' parameters.

The first kernel reads the logits once and reduces every group of neighbouring tokens to its best token and the sum of
its weights. The second has one program per row: it takes the best token (greedy), or draws a group and then one of its
tokens, after a threshold search where the row has filters. Both have static grids and read all parameters on the
device. A row's token does not depend on the other rows.

The reference of the parity tests is `ringcore.model_executor.sampler`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.logits.row_records import load_float32, load_int64, word_of
from ringcore.kernels.logits.sampling_draw import Row, draw_member, exp_of, exponentials, read_logits, scaled
from ringcore.kernels.logits.sampling_filters import Filters, Groups, filter_threshold, first_bound, listed_weights
from ringcore.kernels.logits.sampling_inputs import DeviceSamplingInputs

__all__ = ["DeviceSamplingInputs", "SamplingWorkspace", "group_size", "sample_tokens"]

_TILE = 2048  # logits per program of the first kernel: 8 KiB, and 75 programs for a row of 151,936
_FILTER_TILE = 4096  # logits that a filtered row reads per iteration
_CANDIDATES = 4096  # weights that a filtered row searches in registers


def group_size(vocab_size: int) -> int:
    """Neighbouring tokens per group of the draw's first level: about sqrt(vocab_size), a power of two."""
    return 1 << ((vocab_size.bit_length() + 1) // 2)


@triton.jit
def _group_kernel(
    logits: tl.tensor,  # [n, vocab_size]
    row_stride: int,
    parameters: tl.tensor,  # [n, num_words]
    masked_start: tl.tensor,  # [n]
    masked_end: tl.tensor,  # [n]
    masked_token_ids: tl.tensor,
    maxima: tl.tensor,  # [n, num_groups]: the largest logit; NaN where there is one
    sums: tl.tensor,  # [n, num_groups]: of the weights relative to the group's best; written where temperature > 0
    best_ids: tl.tensor,  # [n, num_groups]: the best token, the first of equals
    vocab_size: int,
    num_groups: int,
    num_tiles: int,
    group: tl.constexpr,
    tile_groups: tl.constexpr,
    num_words: tl.constexpr,  # of a row's parameters, and where they are:
    temperature_at: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    row = (tl.program_id(0) // num_tiles).to(tl.int64)
    groups = tl.program_id(0) % num_tiles * tile_groups + tl.arange(0, tile_groups)
    columns = groups[:, None] * group + tl.arange(0, group)[None, :]
    first_masked = tl.load(masked_start + row)
    end_masked = tl.load(masked_end + row)
    x = read_logits(
        logits + row * row_stride, columns, columns < vocab_size, masked_token_ids, first_masked, end_masked
    )
    row_temperature = load_float32(parameters + row * num_words + temperature_at)
    is_nan = x != x
    x = tl.where(is_nan, -float("inf"), x)
    best, place = tl.max(x, axis=1, return_indices=True)
    any_nan = tl.max(is_nan.to(tl.int32), axis=1) > 0
    out = row * num_groups + groups
    mask = groups < num_groups
    tl.store(maxima + out, tl.where(any_nan, float("nan"), best), mask=mask)
    tl.store(best_ids + out, groups * group + place, mask=mask)
    if row_temperature > 0:
        base = tl.where((best > -float("inf")) & (best < float("inf")), best, 0.0)
        weights = exp_of(scaled(x, row_temperature) - scaled(base, row_temperature)[:, None])
        tl.store(sums + out, tl.sum(weights, axis=1), mask=mask)


@triton.jit
def _draw_filtered_group(
    row: Row,
    groups: Groups,
    filters: Filters,
    group_maxima: tl.tensor,  # [group_block]: weights
    masses: tl.tensor,
    slots: tl.tensor,
    group: tl.constexpr,
    tile: tl.constexpr,
    capacity: tl.constexpr,
):
    """The group drawn, and the smallest weight that the filters keep."""
    total = tl.sum(masses.to(tl.float64), axis=0)
    bound = first_bound(group_maxima, masses, total, filters, row.num_groups, group)
    is_listed = (group_maxima >= bound) & (slots < row.num_groups)
    tl.store(groups.ids + tl.cumsum(is_listed.to(tl.int32), axis=0) - 1, slots, mask=is_listed)
    listed = Groups(groups.ids, tl.sum(is_listed.to(tl.int32), axis=0), groups.candidates)
    tl.debug_barrier()
    threshold = filter_threshold(row, listed, filters, bound, total, group, tile, capacity)
    winner = listed.num_ids * 0
    best = tl.full([], -1.0, tl.float64)
    for start in range(0, listed.num_ids, tile):
        weights, ids = listed_weights(row, listed, start, group, tile)
        kept = tl.sum(tl.where(weights >= threshold, weights, 0.0), axis=1).to(tl.float64)
        score = tl.where(ids >= 0, kept / exponentials(row.seed, row.position, tl.maximum(ids, 0)), -1.0)
        first, place = tl.max(score, axis=0, return_indices=True)
        if first > best:
            best = first
            winner = tl.sum(tl.where(tl.arange(0, tile) == place, ids, 0), axis=0)
    return winner, threshold


@triton.jit
def _row_kernel(
    logits: tl.tensor,
    row_stride: int,
    parameters: tl.tensor,  # [n, num_words]
    position: tl.tensor,  # this and the next two: [n]
    masked_start: tl.tensor,
    masked_end: tl.tensor,
    masked_token_ids: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    best_ids: tl.tensor,
    group_ids: tl.tensor,  # [n, num_groups]: scratch for a filtered row's list
    candidates: tl.tensor,  # [n, capacity]
    token_ids: tl.tensor,  # [n] int64
    ok: tl.tensor,  # [n] bool
    vocab_size: int,
    num_groups: int,
    group: tl.constexpr,
    group_block: tl.constexpr,  # a power of two, num_groups or more
    filter_groups: tl.constexpr,
    capacity: tl.constexpr,
    num_words: tl.constexpr,  # of a row's parameters, and where they are:
    temperature_at: tl.constexpr,
    top_k_at: tl.constexpr,
    top_p_at: tl.constexpr,
    min_p_at: tl.constexpr,
    seed_at: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, group_block)
    mask = slots < num_groups
    largest = tl.load(maxima + i * num_groups + slots, mask=mask, other=-float("inf"))
    is_nan = largest != largest
    largest = tl.where(is_nan, -float("inf"), largest)
    best, first = tl.max(largest, axis=0, return_indices=True)
    is_ok = (tl.sum(is_nan.to(tl.int32), axis=0) == 0) & (best > -float("inf")) & (best < float("inf"))
    token = tl.load(best_ids + i * num_groups + first)
    record = parameters + i * num_words
    row_temperature = load_float32(record + temperature_at)
    if is_ok & (row_temperature > 0):
        first_masked = tl.load(masked_start + i)
        end_masked = tl.load(masked_end + i)
        row = Row(
            logits + i * row_stride,
            row_temperature,
            scaled(best, row_temperature),
            load_int64(record + seed_at),
            tl.load(position + i),
            masked_token_ids,
            first_masked,
            end_masked,
            vocab_size,
            num_groups,
        )
        group_maxima = exp_of(scaled(largest, row_temperature) - row.scaled_best)
        masses = tl.load(sums + i * num_groups + slots, mask=mask, other=0.0) * group_maxima
        k = tl.load(record + top_k_at)
        top_p, min_p = load_float32(record + top_p_at), load_float32(record + min_p_at)
        filters = Filters(tl.where(k >= vocab_size, 0, k), top_p, min_p)
        if (filters.top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0):
            scratch = Groups(group_ids + i * num_groups, num_groups, candidates + i * capacity)
            winner, threshold = _draw_filtered_group(
                row, scratch, filters, group_maxima, masses, slots, group, filter_groups, capacity
            )
        else:
            score = masses.to(tl.float64) / exponentials(row.seed, row.position, slots)
            winner = tl.argmax(tl.where(mask, score, -1.0), axis=0)
            threshold = best * 0.0
        token = draw_member(row, winner, threshold, group)
    tl.store(token_ids + i, token.to(tl.int64))
    tl.store(ok + i, is_ok)


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Scratch between the two kernels; its contents do not outlive a call."""

    maxima: torch.Tensor  # [max_rows, num_groups] float32
    sums: torch.Tensor  # [max_rows, num_groups] float32
    best_ids: torch.Tensor  # [max_rows, num_groups] int32
    group_ids: torch.Tensor  # [max_rows, num_groups] int32
    candidates: torch.Tensor  # [max_rows, 4096] float32

    @classmethod
    def allocate(cls, max_rows: int, vocab_size: int, device: torch.device) -> SamplingWorkspace:
        """About 21 KB per row for a vocabulary of 151,936."""
        num_groups = triton.cdiv(vocab_size, group_size(vocab_size))

        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(max_rows, columns, dtype=dtype, device=device)

        return cls(
            empty(num_groups, torch.float32),
            empty(num_groups, torch.float32),
            empty(num_groups, torch.int32),
            empty(num_groups, torch.int32),
            empty(_CANDIDATES, torch.float32),
        )


def sample_tokens(
    logits: torch.Tensor,
    inputs: DeviceSamplingInputs,
    *,
    token_ids: torch.Tensor | None = None,
    ok: torch.Tensor | None = None,
    workspace: SamplingWorkspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples one token per row: (token_ids [n] int64, ok [n] bool).

    logits: [n, vocab_size] of any float dtype, contiguous columns, not modified; computed in float32. A row is `ok` if
    its largest logit is finite and none is NaN; the token of a row that is not is a valid id without meaning. `inputs`
    has n rows or more. The results are written to `token_ids` and `ok` where given, and `workspace`, for n rows or more
    and this vocabulary, is used where given: with all three, nothing is allocated.

    Greedy rows and rows without filters cost one pass over the logits. Methods: Gumbel-max in two levels, with a
    counter-based RNG (see the sampler), and filter thresholds by bisection in place of a sort.
    """
    n, vocab_size = logits.shape
    if token_ids is None:
        token_ids = torch.empty(n, dtype=torch.int64, device=logits.device)
    if ok is None:
        ok = torch.empty(n, dtype=torch.bool, device=logits.device)
    if workspace is None:
        workspace = SamplingWorkspace.allocate(n, vocab_size, logits.device)
    group = group_size(vocab_size)
    num_groups = triton.cdiv(vocab_size, group)
    group_block = triton.next_power_of_2(num_groups)
    assert logits.stride(1) == 1 or vocab_size == 1, "a row's logits must be contiguous"
    assert (token_ids.shape, token_ids.stride(), token_ids.dtype) == ((n,), (1,), torch.int64), "token_ids: [n] int64"
    assert (ok.shape, ok.stride(), ok.dtype) == ((n,), (1,), torch.bool), "ok: [n] bool"
    assert workspace.maxima.shape[0] >= n, (workspace.maxima.shape, n)
    assert workspace.maxima.shape[1] == num_groups, (workspace.maxima.shape, num_groups)
    assert len(inputs.parameters) >= n, (len(inputs.parameters), n)
    if not n:
        return token_ids, ok
    tile_groups = min(group_block, max(1, _TILE // group))
    num_tiles = triton.cdiv(num_groups, tile_groups)
    shared = (
        inputs.masked_start,
        inputs.masked_end,
        inputs.masked_token_ids,
        workspace.maxima,
        workspace.sums,
        workspace.best_ids,
    )
    pdl = supports_pdl(logits.device)
    _group_kernel[(n * num_tiles,)](
        logits, logits.stride(0), inputs.parameters, *shared, vocab_size, num_groups, num_tiles,
        group=group, tile_groups=tile_groups, **_words(inputs, "temperature"), pdl=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    _row_kernel[(n,)](
        logits, logits.stride(0), inputs.parameters, inputs.position, *shared, workspace.group_ids,
        workspace.candidates, token_ids, ok, vocab_size, num_groups,
        group=group, group_block=group_block, filter_groups=min(group_block, max(1, _FILTER_TILE // group)),
        capacity=_CANDIDATES, **_words(inputs, "temperature", "top_k", "top_p", "min_p", "seed"), pdl=pdl, num_warps=8,
        **launch_options(pdl),
    )  # fmt: skip
    return token_ids, ok


def _words(inputs: DeviceSamplingInputs, *names: str) -> dict[str, int]:
    """The constants by which a kernel reads these parameters."""
    words = {f"{name}_at": word_of(inputs.record, name) for name in names}
    return {"num_words": inputs.parameters.shape[1], **words}
