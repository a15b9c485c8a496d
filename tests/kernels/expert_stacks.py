"""Experts of a checkpoint's quantized matrices, each matrix by itself, as a GPU has them."""

from __future__ import annotations

import torch
from quantized_checkpoints import BLOCK, store

from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor.expert_schemes.stacked import ExpertStack, StackedScheme
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice

__all__ = ["stacked_experts"]


def stacked_experts(
    kind: str,
    scheme: StackedScheme,
    matrices: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    block: tuple[int, int] = BLOCK,
) -> tuple[ExpertWeight, torch.Tensor, dict[str, torch.Tensor]]:
    """matrices: [num_experts, num_outputs, num_inputs] float32, stored as `kind` of `quantized_checkpoints` -> the
    weight, the numbers that are stored, and the tensors of `ExpertStack.weights` in which they are."""
    num_experts, num_outputs, num_inputs = matrices.shape
    each = [store(kind, one, block=block) for one in matrices.cpu()]
    output = OutputSlice("m", num_outputs, 0, num_outputs)
    shard = LinearShard("m", (output,), InputSlice.whole(num_inputs), dtype)
    stack = ExpertStack("m", scheme, (shard,) * num_experts)
    stored = {suffix: [one.tensors[suffix] for one in each] for suffix in each[0].tensors}
    tensors = {suffix: torch.cat(parts).to(matrices.device) for suffix, parts in stored.items()}
    for suffix, weight in stack.weights().items():
        if weight.arrangement is not None:
            weight.arrangement.arrange(tensors[suffix])
    numbers = torch.stack([one.expanded for one in each]).to(matrices.device)
    return stack.bound(tensors, updatable=True), numbers, tensors
