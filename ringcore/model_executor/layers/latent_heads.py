"""The up-projection of latent attention: keys and values of a rank's heads, as functions of latents."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.model_executor.linear_schemes.fused import FusedMatrices
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice
from ringcore.model_executor.weight import Derived, Tensors, Weight, WeightedLayer

__all__ = ["LatentHeads"]


class LatentHeads(WeightedLayer):
    """See `LatentUpProjection`. One matrix, [num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank], head by head
    the rows of its key and then of its value: it is multiplied from either side, so it is never packed, and a quantized
    one is expanded."""

    def __init__(
        self,
        name: str,
        outputs: Sequence[OutputSlice],
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        scheme_of: SchemeOf,
    ) -> None:
        """outputs: of this rank's heads, in the order of the matrix."""
        shard = LinearShard(name, tuple(outputs), InputSlice.whole(kv_lora_rank), dtype)
        self._matrices = FusedMatrices(shard, scheme_of)
        self._num_outputs = sum(part.length for part in outputs)
        self.qk_nope_head_dim, self.v_head_dim = qk_nope_head_dim, v_head_dim
        self._dtype, self._rank, self._derived = dtype, kv_lora_rank, Derived()
        self._product: Product
        self._matrix: torch.Tensor  # [num_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank]

    def weights(self) -> list[Weight]:
        return self._matrices.weights()

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        own = {weight.name: tensors.pop(weight.name) for weight in self.weights()}
        stored = list(own.values())  # none in the sample pass of a fusion, which expands heads alone
        self._product = self._matrices.bind(own, updatable=True)
        if stored:
            is_dense = len(stored) == 1 and stored[0].dtype == self._dtype
            matrix = stored[0] if is_dense else self._derived.make(lambda: self._expanded(stored[0].device))
            self._matrix = matrix.view(-1, self.qk_nope_head_dim + self.v_head_dim, self._rank)

    def _expanded(self, device: torch.device) -> torch.Tensor:
        """The matrix, as its product with every unit vector."""
        units = torch.eye(self._rank, dtype=self._dtype, device=device)
        return self._product(units, NO_TOKEN_CONTEXT).t().contiguous()

    def refresh(self) -> None:
        self._product.refresh()
        self._derived.refresh()

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        keys = self._matrix[:, : self.qk_nope_head_dim]
        return torch.bmm(query.transpose(0, 1), keys).transpose(0, 1)

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        values = self._matrix[:, self.qk_nope_head_dim :]
        return torch.bmm(latents.transpose(0, 1), values.transpose(1, 2)).transpose(0, 1)

    def expanded(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = self.qk_nope_head_dim, self.v_head_dim
        if (heads.stop - heads.start) * sum(sizes) == self._num_outputs:
            both = self._product(latents, NO_TOKEN_CONTEXT)
        else:
            both = torch.nn.functional.linear(latents, self._matrix[heads].flatten(0, 1))
        keys, values = torch.split_with_sizes(both.view(len(latents), -1, sum(sizes)), sizes, -1)
        return keys, values
