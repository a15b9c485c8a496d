"""The token table and the head of a model that a GGUF file has in blocks: our layers in their place, which expand the
rows of the ids and multiply by the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.checkpoint.quantization import GgufFormat, Quantization
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.schemes import schemes_of
from ringcore.model_executor.models.transformers.checkpoint_layout import TensorLayout

__all__ = ["PackedEmbedding", "PackedHead", "PackedVocabulary"]


class PackedEmbedding(nn.Module):
    """Rows of the table, and what the model's own embedding makes of rows (a scale)."""

    def __init__(self, layer: VocabParallelEmbedding, embedding: nn.Embedding) -> None:
        """embedding: on meta, where its table stays."""
        super().__init__()
        self.layer, self._own = layer, embedding
        self._is_plain = type(embedding) is nn.Embedding
        # Of no row: a body may ask its table for a device.
        self.register_buffer("weight", torch.empty_like(embedding.weight[:0], device="cpu"))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [...] int64 -> [..., hidden_size]."""
        rows = self.layer(input_ids.reshape(-1))
        if self._is_plain:
            return rows.view(*input_ids.shape, -1)
        found: torch.Tensor = functional_call(
            self._own, {"weight": rows}, (torch.arange(len(rows)).view_as(input_ids),)
        )
        return found


class PackedHead(nn.Module):
    def __init__(self, layer: ParallelLMHead, vocab_size: int) -> None:
        super().__init__()
        self.layer, self._vocab_size = layer, vocab_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., hidden_size] -> [..., vocab_size] float32."""
        rows = x.reshape(-1, x.shape[-1])
        logits = rows.new_empty(len(rows), self._vocab_size, dtype=torch.float32)
        return self.write(rows, logits).view(*x.shape[:-1], -1)

    def write(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x: [n, hidden_size] -> [n, vocab_size], in `out`."""
        return self.layer(x, NO_TOKEN_CONTEXT, out)


@dataclass(frozen=True, slots=True)
class PackedVocabulary:
    """embedding, head: the modules' names in the model and the matrices' in the checkpoint; None: not in blocks. A head
    that is tied to the embedding has its matrix."""

    embedding: tuple[str, str] | None = None
    head: tuple[str, str] | None = None

    @classmethod
    def of(cls, model: PreTrainedModel, layouts: Mapping[str, TensorLayout], quantization: Quantization | None) -> Self:
        """A table that other modules share than the head, and a head with a bias, are numbers."""
        if quantization is None:
            return cls()
        names = {module: name for name, module in model.named_modules()}
        table, linear = model.get_input_embeddings(), model.get_output_embeddings()
        embedding = _in_blocks(names.get(table), layouts, quantization) if isinstance(table, nn.Embedding) else None
        is_head = type(linear) is nn.Linear and linear.bias is None
        ties = dict(model.all_tied_weights_keys)
        if not ties:
            return cls(embedding, _in_blocks(names[linear], layouts, quantization) if is_head else None)
        if embedding is None or not is_head or ties != {f"{names[linear]}.weight": f"{embedding[0]}.weight"}:
            return cls()
        return cls(embedding, (names[linear], embedding[1]))

    @property
    def replaced(self) -> frozenset[str]:
        return frozenset(path for path, _ in filter(None, (self.embedding, self.head)))

    def install(
        self,
        model: PreTrainedModel,
        quantization: Quantization | None,
        tp: TensorParallel,
        dtype: torch.dtype,
        scheme_of: SchemeOf,
    ) -> dict[str, PackedEmbedding | PackedHead]:
        """Puts ours in their place; -> by path, as they are to be bound."""
        modules: dict[str, PackedEmbedding | PackedHead] = {}
        table: VocabParallelEmbedding | None = None
        if self.embedding is not None:
            path, matrix = self.embedding
            own, as_stored = model.get_submodule(path), schemes_of(quantization)
            assert isinstance(own, nn.Embedding), path
            table = VocabParallelEmbedding(path, matrix, *own.weight.shape, dtype=dtype, tp=tp, scheme_of=as_stored)
            modules[path] = PackedEmbedding(table, own)
        if self.head is not None:
            path, matrix = self.head
            num_outputs, num_inputs = model.get_submodule(path).weight.shape
            tied = table if self.embedding is not None and matrix == self.embedding[1] else None
            head = ParallelLMHead(
                path, matrix, num_outputs, num_inputs, dtype=dtype, tp=tp, tied=tied, scheme_of=scheme_of
            )
            modules[path] = PackedHead(head, num_outputs)
        for path, module in modules.items():
            model.set_submodule(path, module)
        return modules


def _in_blocks(
    path: str | None, layouts: Mapping[str, TensorLayout], quantization: Quantization
) -> tuple[str, str] | None:
    layout = layouts.get(f"{path}.weight")
    if path is None or layout is None or not layout.is_whole:
        return None
    matrix = layout.pieces[0].checkpoint_name.removesuffix(".weight")
    return (path, matrix) if isinstance(quantization.format_of(matrix), GgufFormat) else None
