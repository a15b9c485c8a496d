"""Vocabulary-parallel embedding and LM head.

Each rank has an equal contiguous range of the vocabulary, padded at its end to a multiple of the number of ranks.
Padding rows are zero, no id refers to them, and their logits are cut off.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.linear_op import LinearOp
from ringcore.model_executor.packing import pack_logits
from ringcore.model_executor.weight import Tensors, Weight, WeightedLayer, WeightPart

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]


def _vocab_weight(
    name: str, checkpoint_name: str, vocab_size: int, hidden_size: int, dtype: torch.dtype, tp: TensorParallel
) -> Weight:
    num_rows = -(-vocab_size // tp.size)
    start = min(tp.rank * num_rows, vocab_size)
    length = min(num_rows, vocab_size - start)
    part = WeightPart(f"{checkpoint_name}.weight", (vocab_size, hidden_size), 0, start, length)
    return Weight(f"{name}.weight", (num_rows, hidden_size), dtype, (part,), "matrix")


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
    ) -> None:
        self._weight = _vocab_weight(name, checkpoint_name, vocab_size, hidden_size, dtype, tp)
        self._tp = tp
        self.table: torch.Tensor  # [this rank's rows, hidden_size]

    def weights(self) -> list[Weight]:
        return [self._weight]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        self.table = tensors.pop(self._weight.name)

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [n] int64, in the vocabulary -> a new tensor [n, hidden_size], equal on every rank."""
        if self._tp.size == 1:
            return F.embedding(input_ids, self.table)
        # Each id belongs to one rank; the other ranks add zeros.
        rows = input_ids - self._tp.rank * len(self.table)
        elsewhere = (rows < 0) | (rows >= len(self.table))
        hidden = F.embedding(rows.masked_fill_(elsewhere, 0), self.table)
        return self._tp.all_reduce(hidden.masked_fill_(elsewhere.unsqueeze(-1), 0))


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
    ) -> None:
        self._vocab_size = vocab_size
        self._weight = _vocab_weight(name, checkpoint_name, vocab_size, hidden_size, dtype, tp)
        self._tied = tied
        self._tp = tp
        self._linear: LinearOp

    def weights(self) -> list[Weight]:
        return [self._weight] if self._tied is None else []

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops its tensor, or uses the table of the embedding, which is bound before."""
        table = tensors.pop(self._weight.name) if self._tied is None else self._tied.table
        self._linear = pack_logits(table, updatable)

    def __call__(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [n, hidden_size] -> [n, vocab_size] float32, complete and equal on every rank; in `out` where given,
        without a copy if the vocabulary is not padded."""
        part = self._linear(hidden, out if self._tp.size == 1 else None)
        if out is not None and out.dtype == part.dtype and part.shape[-1] * self._tp.size == self._vocab_size:
            return self._tp.all_gather_last_dim(part, out)
        logits = self._tp.all_gather_last_dim(part)
        if logits.shape[-1] != self._vocab_size:
            logits = logits[:, : self._vocab_size]
        return logits.float().contiguous() if out is None else out.copy_(logits)
