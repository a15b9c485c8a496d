"""What router and experts of a mixture compute, as data and in plain torch: the references of `route` and `experts`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ringcore.kernels.linears.packed_weight import PackedWeight

__all__ = [
    "Activate",
    "ExpertGate",
    "ExpertMatrices",
    "ExpertWeight",
    "RouterForm",
    "Routing",
    "experts_reference",
    "route_reference",
]

# [n, num_weights], the product of the first matrix -> [n, intermediate_size]; each row by itself.
Activate = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ExpertGate:
    """(up + offset) * activation(gate), gate at most `limit`, up between -limit and limit.

    The activation is gate * sigmoid(alpha * gate), silu with alpha 1, or the tanh form of gelu. The limits and offset
    are those of gpt-oss: OpenAI, "gpt-oss-120b & gpt-oss-20b model card", arXiv 2508.10925.
    """

    is_gelu: bool = False
    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    is_interleaved: bool = False  # gate, up, gate, up, ...; else all of gate, then all of up

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, 2 * size] -> [n, size]."""
        gate, up = (rows[..., ::2], rows[..., 1::2]) if self.is_interleaved else rows.chunk(2, -1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        if self.is_gelu:
            activated = torch.nn.functional.gelu(gate, approximate="tanh")
        elif self.alpha == 1.0:
            activated = torch.nn.functional.silu(gate)
        else:
            activated = gate * torch.sigmoid(gate * self.alpha)
        return activated * (up + self.offset if self.offset else up)


class ExpertWeight(ABC):
    """One matrix of each expert of a layer that a rank has, however it is stored."""

    shape: tuple[int, int, int]  # num_experts, num_outputs, num_inputs
    dtype: torch.dtype  # of the inputs
    device: torch.device
    is_transposed: bool = False
    rounds_rows: bool = False  # the product is to see rows as `rounded` returns them
    row_group: int | None = None  # inputs that share a scale of a row, where kernels round it to FP8, as `rounded` does

    @property
    @abstractmethod
    def stored(self) -> torch.Tensor | PackedWeight:
        """As the kernels read it: dense, [num_experts, num_outputs, num_inputs], or the last two exchanged where
        `is_transposed`, contiguous; or the experts' outputs one after the other, num_experts * num_outputs."""

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, num_inputs] of any float dtype, as the product is to see them."""
        return rows

    @abstractmethod
    def numbers(self, experts: torch.Tensor) -> torch.Tensor:
        """experts: [n] int64 -> their matrices, [n, num_outputs, num_inputs] float32: the reference of all products."""

    @abstractmethod
    def product(self, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """On a CPU. rows: [n, num_inputs] of `dtype`, n > 0, sorted by expert; experts: [n] int64, of each row; ends:
        [num_experts] int32, where the rows of each end -> [n, num_outputs] of `dtype`."""

    def refresh(self) -> None:  # noqa: B027 - most derive nothing
        """The stored tensors have new contents: recomputes what was derived from them."""


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """The two matrices of each expert of a layer that a rank has. Experts `first` to `first` + len(self) of the layer,
    whole, or a share of the intermediate size of each."""

    up: ExpertWeight  # with a gate, of twice the intermediate size
    down: ExpertWeight
    up_bias: torch.Tensor | None = None  # [num_experts, num_outputs]
    down_bias: torch.Tensor | None = None  # [num_experts, hidden_size]
    first: int = 0

    def __len__(self) -> int:
        return self.up.shape[0]


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router chose: pair t * k + i is token t with its i-th expert. An index that is no expert of
    `ExpertMatrices` adds nothing to its token: another rank has it."""

    experts: torch.Tensor  # [num_tokens, k], int32 or int64
    weights: torch.Tensor  # [num_tokens, k], any float dtype

    @property
    def k(self) -> int:
        return self.experts.shape[1]


def experts_reference(
    x: torch.Tensor,
    routing: Routing,
    matrices: ExpertMatrices,
    activate: Activate,
    normalise: Activate | None = None,
) -> torch.Tensor:
    """x: [n, hidden_size] -> [n, hidden_size] float32, the weighted sum over the experts of each token.

    Pair by pair, in float32, with the matrices of each gathered. normalise: of an expert's output, before its weight.
    """
    local = routing.experts.reshape(-1).long() - matrices.first
    is_here = (local >= 0) & (local < len(matrices))
    local = local.clamp(0, len(matrices) - 1)
    rows = _products(x.float().repeat_interleave(routing.k, 0), matrices.up, matrices.up_bias, local)
    rows = _products(activate(rows), matrices.down, matrices.down_bias, local)
    rows = rows if normalise is None else normalise(rows)
    rows = rows.masked_fill(~is_here[:, None], 0) * routing.weights.float().reshape(-1, 1)
    return rows.view(len(x), routing.k, -1).sum(1)


def _products(rows: torch.Tensor, weight: ExpertWeight, bias: torch.Tensor | None, local: torch.Tensor) -> torch.Tensor:
    out = torch.bmm(weight.numbers(local), weight.rounded(rows)[:, :, None])[:, :, 0]
    return out if bias is None else out + bias[local].float()


@dataclass(frozen=True, slots=True)
class RouterForm:
    """How a router chooses k experts of a token by its logits.

    is_sigmoid: scores are sigmoids of the logits; else their softmax over all experts. rounds_logits: to the dtype of
    the rows, as a linear does; else they are those of float32. normalises: the weights sum to 1, before they are
    multiplied by scale. dtype: of the weights; None: that of the rows.
    """

    k: int
    normalises: bool = False
    is_sigmoid: bool = False
    rounds_logits: bool = True
    scale: float = 1.0
    dtype: torch.dtype | None = None


def route_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    form: RouterForm,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
) -> Routing:
    """The operations of transformers in its dtypes, so that near ties fall as they do there: scores in float32, torch's
    own top-k. bias: [num_experts], of the logits. correction: [num_experts], of the scores by which experts are
    chosen, which are weighted without it."""
    dtype = x.dtype if form.rounds_logits else torch.float32
    logits = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).float()
    scores = logits.sigmoid() if form.is_sigmoid else logits.softmax(-1)
    experts = (scores if correction is None else scores + correction.float()).topk(form.k, -1)[1]
    weights = scores.gather(1, experts)
    if form.normalises:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(experts, (weights * form.scale).to(form.dtype or x.dtype))
