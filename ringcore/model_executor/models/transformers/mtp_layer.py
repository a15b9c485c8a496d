"""The decoder layer of a layer of multi-token prediction as a model of transformers that has it alone: its experts,
attention and fusion are those of any model."""

from __future__ import annotations

from dataclasses import replace

import torch

from ringcore.attention.context import ForwardContext
from ringcore.checkpoint import TransformersSpec
from ringcore.checkpoint.mtp_head import MtpHeadSpec
from ringcore.distributed.parallel import LAYERS_ALONE, TensorParallel
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.models.mtp_head import MtpLayer
from ringcore.model_executor.models.transformers.model import TransformersModel
from ringcore.model_executor.weight import Tensors, Weight, WeightPart

__all__ = ["TransformersMtpLayer"]


class TransformersMtpLayer(MtpLayer):
    def __init__(
        self,
        head: MtpHeadSpec,
        index: int,
        tp: TensorParallel,
        dtype: torch.dtype,
        max_model_len: int,
        expert_parallel: bool,
    ) -> None:
        """Raises `ModelLoadError` with the reason why it cannot be computed here."""
        assert isinstance(head.layer, TransformersSpec), head
        self._head = head
        given = head.layer, tp, dtype, max_model_len, all_dense
        self._model = TransformersModel(*given, LAYERS_ALONE, expert_parallel=expert_parallel)
        (own,) = self._model.attention_layers
        self._own, self.attention = own.index, replace(own, index=index)

    def weights(self) -> list[Weight]:
        """Those of the layer, and of a final norm that nothing reads."""
        return [
            replace(weight, parts=tuple(self._named(part) for part in weight.parts)) for weight in self._model.weights()
        ]

    def _named(self, part: WeightPart) -> WeightPart:
        return replace(part, checkpoint_name=self._head.in_checkpoint(part.checkpoint_name))

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        self._model.bind(tensors, updatable)

    def refresh(self) -> None:
        self._model.refresh()

    def __call__(self, rows: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Zero where it is not finite: keys and values stay in pages that another layer may get."""
        place = self.attention.index
        alone = replace(
            ctx,
            group_of_layer={self._own: ctx.group_of_layer[place]},
            kv_caches={self._own: ctx.kv_caches[place]},
        )
        return self._model.forward(torch.nan_to_num_(rows, 0.0, 0.0, 0.0), positions, alone)
