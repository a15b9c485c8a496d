"""The experts of a mixture on a CPU: tokens sorted by expert, a product over the experts with rows."""

from __future__ import annotations

import torch

from ringcore.kernels.mixtures.expert_matrices import Activate, ExpertMatrices, ExpertWeight, Routing

__all__ = ["grouped_experts"]


def grouped_experts(
    x: torch.Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    activate: Activate,
    normalise: Activate | None = None,
) -> torch.Tensor:
    """x: [n, hidden_size] -> [n, hidden_size] float32, as `experts_reference`. Each expert with rows is read once;
    rows of experts of other ranks are not computed."""
    local = routing.experts.reshape(-1).long() - matrices.first
    local = local.masked_fill((local < 0) | (local >= len(matrices)), len(matrices))
    experts, order = local.sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(len(matrices)), right=True).int()
    num_rows = int(ends[-1])
    experts, order = experts[:num_rows], order[:num_rows]
    tokens = order // routing.k
    rows = _products(x[tokens], matrices.up, matrices.up_bias, experts, ends)
    rows = _products(activate(rows), matrices.down, matrices.down_bias, experts, ends)
    rows = (rows if normalise is None else normalise(rows)).float()
    weights = routing.weights.reshape(-1)[order].float()
    # One after the other: the sum of a token has one order, whatever the other tokens are.
    return torch.zeros(x.shape, dtype=torch.float32).index_add_(0, tokens, rows * weights[:, None])


def _products(
    rows: torch.Tensor, weight: ExpertWeight, bias: torch.Tensor | None, experts: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """rows: [n, in], sorted by expert -> [n, out]. experts: [n] of each row; ends: [num_experts] int32."""
    if not len(rows):
        return rows.new_empty(0, weight.shape[1])
    out = weight.product(weight.rounded(rows), experts, ends)
    return out if bias is None else out + bias[experts]
