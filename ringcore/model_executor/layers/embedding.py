"""Vocabulary-parallel embedding and LM head.

Each rank has an equal contiguous range of the vocabulary, padded at its end to a multiple of the number of ranks.
Padding rows are zero, no id refers to them, and their logits are cut off.
"""

from __future__ import annotations

import torch

from ringcore.attention.context import TokenContext
from ringcore.checkpoint.matrix_tensors import DENSE
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.dense import Dense, all_dense
from ringcore.model_executor.linear_schemes.fused import FusedMatrices
from ringcore.model_executor.linear_schemes.gguf_scheme import GgufScheme, RowsOfBlocks, rows_of_blocks
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice
from ringcore.model_executor.weight import Tensors, Weight, WeightedLayer

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]


(_TABLE,) = DENSE  # [vocab_size, hidden_size]


def _vocab_shard(
    name: str, checkpoint_name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype, tp: TensorParallel
) -> LinearShard:
    num_rows = -(-vocab_size // tp.size)
    start = min(tp.rank * num_rows, vocab_size)
    length = min(num_rows, vocab_size - start)
    return LinearShard(
        name,
        (OutputSlice(checkpoint_name, vocab_size, start, length),),
        InputSlice.whole(hidden_size),
        dtype,
        num_padded_outputs=num_rows - length,
        prefers_float32=True,
    )


class VocabParallelEmbedding(WeightedLayer):
    def __init__(
        self,
        name: str,
        checkpoint_name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        tp: TensorParallel,
        scheme_of: SchemeOf = all_dense,
    ) -> None:
        """scheme_of: a table in blocks of a GGUF file stays so; any other is dense."""
        shard = _vocab_shard(name, checkpoint_name, vocab_size, hidden_size, dtype, tp)
        scheme = scheme_of(checkpoint_name)
        self._blocks = scheme.format if isinstance(scheme, GgufScheme) else None
        weights = scheme.weights(shard) if isinstance(scheme, GgufScheme) else Dense().weights(shard)
        self._weight = weights[_TABLE.suffix]
        self._dtype, self._tp = dtype, tp
        self.table: torch.Tensor  # [this rank's rows, hidden_size], or bytes of a row
        self._table_in_blocks: RowsOfBlocks | None = None

    def weights(self) -> list[Weight]:
        return [self._weight]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        self.table = tensors.pop(self._weight.name)
        if self._blocks is not None:
            self._table_in_blocks = rows_of_blocks(self.table, self._blocks)

    def __call__(
        self, input_ids: torch.Tensor, dtype: torch.dtype | None = None, scale: float | None = None
    ) -> torch.Tensor:
        """input_ids: [n] int64, in the vocabulary -> a new tensor [n, hidden_size] of dtype (None: the layer's), equal
        on every rank: the rows times `scale`, in the layer's dtype."""
        if self._tp.size == 1:
            return self._rows(input_ids, None, scale, dtype)
        # Each id belongs to one rank; the other ranks add zeros.
        rows = self._tp.all_reduce(self._rows(input_ids, self._tp.rank * len(self.table), scale, None))
        return rows if dtype is None else rows.to(dtype)

    def _rows(
        self, index: torch.Tensor, first: int | None, scale: float | None, dtype: torch.dtype | None
    ) -> torch.Tensor:
        if self._table_in_blocks is None:
            return ops.gather_rows(self.table, index, first=first, scale=scale, dtype=dtype)
        rows, blocks = len(self.table), self._table_in_blocks
        return ops.rows_by(lambda found: blocks.rows(found).to(self._dtype), rows, index, first, scale, dtype)


class ParallelLMHead(WeightedLayer):
    """Logits from the table of `tied` (tied word embeddings) where given, else from its own matrix."""

    def __init__(
        self,
        name: str,
        checkpoint_name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        tp: TensorParallel,
        tied: VocabParallelEmbedding | None,
        scheme_of: SchemeOf,
    ) -> None:
        """scheme_of: of a tied head, dense or a decoration of it: the table is."""
        self._vocab_size = vocab_size
        shard = _vocab_shard(name, checkpoint_name, vocab_size, hidden_size, dtype, tp)
        self._matrices = FusedMatrices(shard, scheme_of)
        self._tied = tied
        self._tp = tp
        self._product: Product

    def weights(self) -> list[Weight]:
        return self._matrices.weights(frozenset() if self._tied is None else frozenset((_TABLE.suffix,)))

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops its tensors; uses the table of the embedding, which is bound before, where it is tied to it."""
        borrowed = None if self._tied is None else {_TABLE.suffix: self._tied.table}
        self._product = self._matrices.bind(tensors, updatable, borrowed=borrowed)

    def refresh(self) -> None:
        self._product.refresh()

    def __call__(self, hidden: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [n, hidden_size] -> [n, vocab_size] float32, complete and equal on every rank; in `out` where given,
        without a copy if the vocabulary is not padded."""
        part = self._product(hidden, tokens, out if self._tp.size == 1 else None)
        if out is not None and out.dtype == part.dtype and part.shape[-1] * self._tp.size == self._vocab_size:
            return self._tp.all_gather_last_dim(part, out)
        logits = self._tp.all_gather_last_dim(part)
        if logits.shape[-1] != self._vocab_size:
            logits = logits[:, : self._vocab_size]
        return logits.float().contiguous() if out is None else out.copy_(logits)
