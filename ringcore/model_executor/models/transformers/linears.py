"""The linears and the embedding of a model that stay where transformers has them: this rank's share, and our
products."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.dense import dense_product
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.searched_scheme import SearchedTiles, searched

__all__ = ["ParallelEmbedding", "ParallelLinear", "take_part", "use_products"]


class ParallelLinear(nn.Module):
    """A linear that is whole, or split by its outputs (`dim` 0) or its inputs (`dim` 1). Where `whole`, the gathered
    outputs or the unsplit inputs of a split one are the same on every rank."""

    def __init__(self, linear: nn.Linear, tp: TensorParallel, dim: int | None = None, whole: bool = False) -> None:
        super().__init__()
        self.dim, self.whole, self.tp = dim, whole, tp
        shape = [size // tp.size if dim == i else size for i, size in enumerate(linear.weight.shape)]
        self.in_features, self.out_features = shape[1], shape[0]
        self.weight = nn.Parameter(linear.weight.new_empty(shape), requires_grad=False)
        self.register_parameter("bias", None)
        if linear.bias is not None:
            self.bias = nn.Parameter(linear.bias.new_empty(shape[0]), requires_grad=False)
        self._product: Product | None = None

    def bind(self, updatable: bool, prefers_float32: bool, tiles: SearchedTiles | None = None) -> None:
        """Computes by the fastest product for the device of its tensors from now on; a weight that the product keeps in
        another form is freed. tiles: what a search found, on a GPU."""
        bias = None if self.dim == 1 else self.bias
        product = dense_product(self.weight, bias, updatable, prefers_float32)
        self._product = searched(product, tiles, self.weight.nbytes)
        if self.weight.device.type == "cpu" and not updatable:
            self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def refresh(self) -> None:
        if self._product is not None:
            self._product.refresh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in], or this rank's share of it -> [..., out], or this rank's share of it."""
        if self.dim == 1:
            if self.whole:
                x = x.chunk(self.tp.size, -1)[self.tp.rank]
            out = self.tp.all_reduce(self._multiply(x, None))
            return out if self.bias is None else out + self.bias
        out = self._multiply(x, self.bias)
        return self.tp.all_gather_last_dim(out) if self.dim == 0 and self.whole else out

    def write(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x: [n, in] -> [n, all outputs], in `out`, of another dtype perhaps."""
        if self.dim is None and self._product is not None:
            return self._product(x, NO_TOKEN_CONTEXT, out)
        if self.dim != 0:
            return out.copy_(self(x))
        product = self._multiply(x, self.bias)
        if out.dtype == product.dtype:
            return self.tp.all_gather_last_dim(product, out)
        return out.copy_(self.tp.all_gather_last_dim(product))

    def _multiply(self, x: torch.Tensor, bias: nn.Parameter | None) -> torch.Tensor:
        if self._product is None:
            return nn.functional.linear(x, self.weight, bias)
        return self._product(x.reshape(-1, x.shape[-1]), NO_TOKEN_CONTEXT).view(*x.shape[:-1], -1)


class ParallelEmbedding(nn.Module):
    """An embedding of one rank, or split by its vocabulary: an equal, contiguous range of the ids on each rank."""

    dim = 0

    def __init__(self, embedding: nn.Embedding, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        rows, width = embedding.weight.shape
        self.weight = nn.Parameter(embedding.weight.new_empty(rows // tp.size, width), requires_grad=False)
        self.register_parameter("bias", None)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [...] int64 -> [..., hidden_size]. Each id belongs to one rank; the others add zeros."""
        first = None if self.tp.size == 1 else self.tp.rank * len(self.weight)
        rows = ops.gather_rows(self.weight, input_ids.flatten(), first=first)
        return self.tp.all_reduce(rows.view(*input_ids.shape, -1))


def take_part(model: PreTrainedModel, tp: TensorParallel) -> None:
    """From now on with the other ranks, which took no part while the passes were recorded."""
    for module in model.modules():
        if isinstance(module, ParallelLinear | ParallelEmbedding):
            module.tp = tp


def use_products(model: PreTrainedModel, names: Collection[str], tp: TensorParallel) -> None:
    """Puts ours in the place of the linears of these names and of the head, that are not split, and of one rank's plain
    embedding of tokens."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and (name in names or module is head):
            model.set_submodule(name, ParallelLinear(module, tp))
        elif tp.size == 1 and module is embedding and type(module) is nn.Embedding:
            model.set_submodule(name, ParallelEmbedding(module, tp))
