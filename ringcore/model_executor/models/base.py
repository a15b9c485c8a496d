"""The interface between the worker and a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext, TokenContext
from ringcore.attention.layer import AnyAttention
from ringcore.checkpoint import ModelSpec
from ringcore.checkpoint.expected_tensors import is_dispensable
from ringcore.distributed.parallel import ONLY_STAGE, Stage, TensorParallel
from ringcore.model_executor.arithmetic import FASTEST, Arithmetic
from ringcore.model_executor.layers.expert_slots import ExpertSlots
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.models.draft_head import DraftHead
from ringcore.model_executor.weight import Tensors, Weight
from ringcore.protocol.model_report import ModelReport

__all__ = ["CausalLM"]


class CausalLM(ABC):
    """A decoder-only language model on one rank. Built without weights; `weights()` declares them."""

    vocab_size: int
    hidden_size: int
    stage: Stage
    attention_layers: Sequence[AnyAttention]  # of the stage
    draft_head: DraftHead | None = None
    elsewhere: Sequence[Weight]  # of other stages, and all experts where each is on some ranks only

    @abstractmethod
    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        dtype: torch.dtype,
        max_model_len: int,
        scheme_of: SchemeOf,
        stage: Stage = ONLY_STAGE,
        expert_parallel: bool = False,
        redundant_experts: int | None = None,
        arithmetic: Arithmetic = FASTEST,
    ) -> None:
        """scheme_of: the linear scheme of a matrix, by its name in the checkpoint. stage: that it computes.
        expert_parallel: each rank has whole experts of a mixture, and not a share of each. redundant_experts: see
        `ExpertSlots`. arithmetic: which algorithms compute it."""

    @property
    def expert_slots(self) -> Sequence[ExpertSlots]:
        """Of the layers of the stage whose experts may be placed anew, in order."""
        return ()

    def report(self) -> ModelReport:
        """What computes it."""
        return ModelReport("native", len(self.attention_layers))

    @abstractmethod
    def weights(self) -> Sequence[Weight]:
        """Every tensor of this rank: its final (fused, sharded) shape and the checkpoint slices that fill it."""

    def attach(self, head: DraftHead) -> None:
        """Takes a head that drafts: its attention layer is one of the model's, and the forward pass calls its `tap`."""
        raise AssertionError(f"{type(self).__name__} has no place for a head: refused with the options")

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [n] int64 -> a new tensor [n, hidden_size], for a head."""
        raise AssertionError(f"{type(self).__name__} has no head")

    def may_ignore(self, checkpoint_name: str) -> bool:
        """Whether a checkpoint may have this tensor though the stage does not use it."""
        return is_dispensable(checkpoint_name) or checkpoint_name in self._names_elsewhere

    @cached_property
    def _names_elsewhere(self) -> frozenset[str]:
        return frozenset(part.checkpoint_name for weight in self.elsewhere for part in weight.parts)

    @abstractmethod
    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Binds the loaded tensors, by `Weight.name`, and prepares them for the device (packing on a CPU).

        updatable: the tensors keep their addresses for the life of the model and may get new contents there; then the
        worker calls `refresh`.
        """

    @abstractmethod
    def refresh(self) -> None:
        """The tensors have new contents: recomputes what was derived from them, at the same addresses."""

    def new_inputs(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """What `forward` takes of a dummy step: of the first stage ids, of the others rows; zeros."""
        if self.stage.is_first:
            return torch.zeros(num_tokens, dtype=torch.int64, device=device)
        return torch.zeros(num_tokens, self.hidden_size, dtype=torch.float32, device=device)

    @abstractmethod
    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """inputs: [num_tokens] int64, ids; or, where the stage is not the first, the previous one's output. positions:
        [num_tokens] int64 -> hidden states [num_tokens, hidden_size]; or, where the stage is not the last, the residual
        stream, float32."""

    @abstractmethod
    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, tokens: TokenContext = NO_TOKEN_CONTEXT
    ) -> torch.Tensor:
        """hidden: [n, hidden_size] -> logits [n, vocab_size], float32, complete and equal on every rank; in `out`,
        contiguous, where given. tokens: of the rows of `hidden`."""
