"""The experts of a mixture (fused MoE): a sort of the tokens by expert, two grouped products, the sum over experts.

    sort of the pairs       which pairs of a token and an expert each expert has; of few tokens a list of work items,
                            and for very few each pair is one
    product of gate and up  the rows of each expert gathered, the activation as its epilogue
    product of down         the weighted sum over the experts of a token, and the residual add, as its epilogue for very
                            few tokens; for more a deferred add, or a launch of its own

All shapes are those of the tokens and of the layer, none depends on the routing, and the host reads nothing: so a CUDA
graph of it serves every routing. Sums over experts have one order. Method: Gale et al., "MegaBlocks: efficient sparse
training with mixture-of-experts", arXiv 2211.15841, without its padding to blocks. One token takes no grouped products:
see `experts_fma`. FP8 weights whose rows are to be rounded are multiplied by FP8 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

import torch
import triton

from ringcore.kernels.launch.dependent_launch import launch_options, supports_pdl
from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.linears.round_rows import round_rows
from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.linears.skinny_times import DENSE_NUMBERS, FP8_NUMBERS, Numbers
from ringcore.kernels.linears.weight_tiles import tile_arguments
from ringcore.kernels.mixtures.expert_matrices import Activate, ExpertGate, ExpertMatrices, ExpertWeight, Routing
from ringcore.kernels.mixtures.experts_configs import (
    MAX_FEW_TOKENS,
    MAX_LISTED_PAIRS,
    MAX_LISTED_TOKENS,
    MAX_PAIRED_TOKENS,
    MAX_SUMMED_TOKENS,
    choose_grouped,
)
from ringcore.kernels.mixtures.experts_fma import experts_of_one_token, takes_one_token
from ringcore.kernels.mixtures.experts_kernels import grouped_kernel, weighted_sum_kernel
from ringcore.kernels.mixtures.experts_sort import list_items, max_items, sort_pairs
from ringcore.kernels.partials import Partials

__all__ = ["GroupedProducts", "TokenLimits", "experts", "new_expert_counters", "takes_norm"]

_MIN_BLOCK_OUTPUTS = 16
_MAX_BLOCK = 1024
_MIN_SPLIT_ROWS = 128  # of a tile: that of an expert's last rows has half as many where they fit


class TokenLimits(NamedTuple):
    """Up to how many tokens a mixture is computed in another way. With `invariant_experts.ANY_NUMBER` there is one way,
    and a token's sum depends on the tiles alone."""

    fma: int = 1  # by FMA; more than one are never
    summed: int = MAX_SUMMED_TOKENS  # the sum over experts is an epilogue
    wide: int = MAX_FEW_TOKENS  # the rows of experts are float32


DEFAULT_LIMITS = TokenLimits()


def new_expert_counters(matrices: ExpertMatrices) -> torch.Tensor:
    """The arrival counters by which programs of one outputs tile find the last one: 0 before and after a launch."""
    tiles = triton.cdiv(matrices.down.shape[1], _MIN_BLOCK_OUTPUTS)
    return torch.zeros(tiles, dtype=torch.int32, device=matrices.down.device)


def experts(
    x: torch.Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    activate: Activate,
    normalise: Activate | None = None,
    *,
    counters: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
    defer: Callable[[Partials], None] | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    config: DotConfig | None = None,
    choose: Callable[..., DotConfig] = choose_grouped,
    limits: TokenLimits = DEFAULT_LIMITS,
) -> torch.Tensor:
    """The weighted sum over the experts of each token, as `experts_reference`; accumulated in float32. x: [n,
    hidden_size] of the matrices' dtype, contiguous.

    activate: an `ExpertGate` is an epilogue; any other function is called for the product of all pairs, of which those
    of other ranks are undefined. normalise: likewise of the outputs of experts, before their weights.
    counters: see `new_expert_counters`, not shared with what may run at the same time; allocated if not given.
    defer: with add_to, of experts that are all here: gets the rows of the experts and their weights where the sum would
    be a launch of its own, and add_to stays as it is.
    norm: prologue, of what `takes_norm`: gain [hidden_size] and eps; x may have any float dtype, and its norm is not
    rounded before the product.
    config: of both grouped products; by default as `choose` says of each, and one token by FMA where that is possible
    and within the limits.

    Returns add_to [n, hidden_size], also float32, with the sum added in place; or out; or a new tensor of x's dtype.
    """
    target = _target(x, matrices, out, add_to)
    if not len(x):
        return target
    routing = Routing(routing.experts.contiguous(), routing.weights.contiguous())
    by_fma = config is None and takes_norm(len(x), matrices, activate, normalise, limits)
    if by_fma and isinstance(activate, ExpertGate):
        return experts_of_one_token(x, routing, matrices, activate, target, adds=add_to is not None, norm=norm)
    assert norm is None, "the norm is a prologue for one token by FMA"
    grouped = GroupedProducts(routing, matrices, config, choose)
    inner = grouped.inner(x, activate)
    dtype = torch.float32 if len(x) <= limits.wide else x.dtype
    if normalise is None and len(x) <= limits.summed:
        counters = new_expert_counters(matrices) if counters is None else counters
        sums = _Sum(target, counters, add_to is not None)
        grouped.product(inner, matrices.down, matrices.down_bias, dtype, reads_pairs=True, sums=sums)
        return target
    rows = grouped.product(inner, matrices.down, matrices.down_bias, dtype, reads_pairs=True)
    rows = rows if normalise is None else normalise(rows).contiguous()
    if defer is not None:
        assert add_to is not None
        defer(Partials(rows.view(*routing.experts.shape, -1).transpose(0, 1), routing.weights))
        return target
    return _weighted_sum(rows, routing, matrices, target, adds=add_to is not None)


def _target(
    x: torch.Tensor, matrices: ExpertMatrices, out: torch.Tensor | None, add_to: torch.Tensor | None
) -> torch.Tensor:
    assert out is None or add_to is None, "give add_to or out, not both"
    target = out if add_to is None else add_to
    if target is None:
        return torch.empty_like(x, dtype=matrices.up.dtype)
    assert target.shape == x.shape, (target.shape, x.shape)
    assert target.is_contiguous()
    return target


def takes_norm(
    num_tokens: int,
    matrices: ExpertMatrices,
    activate: Activate,
    normalise: Activate | None = None,
    limits: TokenLimits = DEFAULT_LIMITS,
) -> bool:
    """Whether `experts` has a norm as its prologue for so many tokens."""
    return num_tokens <= limits.fma and takes_one_token(matrices, activate, normalise)


class _Sum:
    """The weighted sum as an epilogue."""

    def __init__(self, out: torch.Tensor, counters: torch.Tensor, adds: bool) -> None:
        self.out, self.counters, self.adds = out, counters, adds


class GroupedProducts:
    """Launches the products of one routing."""

    def __init__(
        self,
        routing: Routing,
        matrices: ExpertMatrices,
        config: DotConfig | None = None,
        choose: Callable[..., DotConfig] = choose_grouped,
    ) -> None:
        self._num_tokens, self._routing, self._matrices = len(routing.experts), routing, matrices
        self._config, self._choose = config, choose
        self._by_pair = self._num_tokens <= MAX_PAIRED_TOKENS
        self._has_items = self._num_tokens <= MAX_LISTED_TOKENS and routing.experts.numel() <= MAX_LISTED_PAIRS
        self._sorted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by rows of a tile; 0: of any

    def _sort(self, block_rows: int) -> tuple[tuple[torch.Tensor, torch.Tensor], bool]:
        """(`WorkItems` or `SortedPairs`, whether an earlier product had the same)"""
        experts, first, num_experts = self._routing.experts, self._matrices.first, len(self._matrices)
        if self._by_pair:
            return (experts, experts), True  # not read
        rows = block_rows if self._has_items else 0
        is_new = rows not in self._sorted
        if is_new:
            args = experts, num_experts, first
            self._sorted[rows] = list_items(*args, rows) if self._has_items else sort_pairs(*args)
        return self._sorted[rows], not is_new

    def inner(self, x: torch.Tensor, activate: Activate) -> torch.Tensor:
        """The activated product of gate and up: a row a pair."""
        up, bias = self._matrices.up, self._matrices.up_bias
        if isinstance(activate, ExpertGate):
            return self.product(x, up, bias, x.dtype, gate=activate)
        return activate(self.product(x, up, bias, x.dtype)).contiguous()

    def product(
        self,
        x: torch.Tensor,
        weight: ExpertWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        gate: ExpertGate | None = None,
        reads_pairs: bool = False,
        sums: _Sum | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: a row a token, or a pair where reads_pairs -> a row a pair: [num_pairs, num_outputs] of dtype, or out."""
        matrices, routing, k = self._matrices, self._routing, self._routing.k
        (num_experts, num_weights, num_inputs), stored, group = weight.shape, weight.stored, weight.row_group or 0
        assert (x.shape[1], x.dtype) == (num_inputs, weight.dtype), (x.shape, x.dtype, weight.shape, weight.dtype)
        x, scales = round_rows(x, group)[:2] if group else (weight.rounded(x), x)
        num_outputs = num_weights if gate is None else num_weights // 2
        config = self._config or self._choose(*weight.shape, self._num_tokens, k, weight.dtype, _numbers(weight))
        block_outputs = config.block_weights if gate is None else config.block_weights // 2
        assert sums is None or block_outputs >= _MIN_BLOCK_OUTPUTS, config
        _assert_fits(config, x, stored, bias, group)
        num_pairs, gate, pdl = self._num_tokens * k, gate or ExpertGate(), supports_pdl(x.device)
        rows = torch.empty(num_pairs, num_outputs, dtype=dtype, device=x.device) if out is None else out
        assert sums is None or self._by_pair, self._num_tokens
        pairs, was_sorted = self._sort(config.block_rows)
        num_items = num_pairs if self._by_pair else max_items(num_pairs, num_experts, config.block_rows)
        grouped_kernel[(triton.cdiv(num_outputs, block_outputs), num_items)](
            *(x, scales, rows if bias is None else bias, *pairs, rows),
            *(routing.experts, routing.weights, *((rows, rows) if sums is None else (sums.out, sums.counters))),
            *(self._num_tokens, matrices.first),
            **tile_arguments(stored, are_numbers=group > 0),
            row_group=group,
            k=k,
            block_k=triton.next_power_of_2(k),
            num_experts=num_experts,
            block_experts=triton.next_power_of_2(num_experts),
            num_weights=num_weights,
            num_inputs=num_inputs,
            block_rows=config.block_rows,
            tail_rows=config.block_rows // 2 if config.block_rows >= _MIN_SPLIT_ROWS else 0,
            block_inputs=config.block_inputs,
            block_weights=config.block_weights,
            num_stages=config.num_stages,
            is_whole=num_inputs % config.block_inputs == 0,
            by_pair=self._by_pair,
            has_items=self._has_items,
            reads_pairs=reads_pairs,
            finds_early=reads_pairs and was_sorted,
            is_transposed=weight.is_transposed,
            has_bias=bias is not None,
            is_gated=num_outputs != num_weights,
            **asdict(gate),
            sums=sums is not None,
            adds=sums is not None and sums.adds,
            pdl=pdl,
            num_warps=config.num_warps,
            **launch_options(pdl),
        )
        return rows


def _assert_fits(
    config: DotConfig, x: torch.Tensor, stored: torch.Tensor | PackedWeight, bias: torch.Tensor | None, group: int
) -> None:
    for tensor in (x, stored, bias):
        assert not isinstance(tensor, torch.Tensor) or tensor.is_contiguous(), "tensors must be contiguous"
    assert not isinstance(stored, PackedWeight) or stored.has_whole_runs(config.block_inputs), (stored.run, config)
    assert not group or group % config.block_inputs == 0, (group, config)


def _numbers(weight: ExpertWeight) -> Numbers:
    if weight.row_group is not None:
        return FP8_NUMBERS
    return weight.stored.numbers if isinstance(weight.stored, PackedWeight) else DENSE_NUMBERS


def _weighted_sum(
    rows: torch.Tensor, routing: Routing, matrices: ExpertMatrices, out: torch.Tensor, *, adds: bool
) -> torch.Tensor:
    """rows: [num_tokens * k, size] -> out [num_tokens, size]."""
    num_tokens, size = out.shape
    block, pdl = min(_MAX_BLOCK, triton.next_power_of_2(size)), supports_pdl(rows.device)
    weighted_sum_kernel[(num_tokens, triton.cdiv(size, block))](
        *(rows, routing.experts, routing.weights, out),
        matrices.first,
        k=routing.k,
        block_k=triton.next_power_of_2(routing.k),
        num_experts=len(matrices),
        size=size,
        block=block,
        adds=adds,
        pdl=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return out
