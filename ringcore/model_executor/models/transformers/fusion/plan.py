"""What a decoder layer of transformers computes, as data."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch

from ringcore.checkpoint.family import Activation
from ringcore.model_executor.layers.activation import Pointwise
from ringcore.model_executor.layers.rotary import interleaved
from ringcore.model_executor.models.transformers.fusion.module_sublayer import Arguments

__all__ = [
    "AnyAttentionPlan",
    "AttentionPlan",
    "GatedPlan",
    "LatentPlan",
    "LatentSizes",
    "LayerNorms",
    "LayerPlan",
    "LinearRows",
    "MLPPlan",
    "ModulePlan",
    "NormPlan",
    "PlainPlan",
    "RotaryPlan",
    "of_other_layer",
]


@dataclass(frozen=True, slots=True)
class LinearRows:
    """Outputs `start` to `start + length` of a linear with `num_outputs` of them."""

    path: str  # of the linear, in the body; so are the other paths here
    num_outputs: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class NormPlan:
    """is_centred: the mean is taken off first. A centred norm may have a bias, or no weight."""

    path: str
    size: int
    eps: float
    plus_one: bool
    is_centred: bool = False
    has_weight: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class RotaryPlan:
    """How pairs of a head's first `dim` entries are rotated. source: the call of the module that computes the angles,
    among those of a pass. halves: entry i is paired with i + dim / 2; otherwise 2i with 2i + 1. stride: the angle of
    pair i is entry stride * i of a cosine."""

    source: int
    dim: int
    halves: bool
    stride: int

    def order(self, head_size: int) -> tuple[int, ...]:
        """Of the entries of a head, as in `WeightPart`: so that pairs are interleaved."""
        entries = interleaved(head_size, self.dim) if self.halves else torch.arange(head_size)
        return tuple(entries.tolist())


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    q: tuple[LinearRows, ...]  # by head, as the next two
    k: tuple[LinearRows, ...]
    v: tuple[LinearRows, ...]
    has_bias: bool
    out: str
    out_has_bias: bool
    query_scale: float  # of the rows of q, before attention
    rotary: RotaryPlan | None
    qk_norms: tuple[NormPlan, NormPlan] | None
    sinks: str | None  # the name of their tensor

    def rotated_size(self, head_size: int) -> int:
        """The numbers of a head, all or its last ones, that the rotary embedding is given."""
        return head_size


@dataclass(frozen=True, slots=True)
class LatentSizes:
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, slots=True)
class LatentPlan:
    """Latent attention, the parameters' names being DeepSeek's in transformers: of each head of `q` the last
    qk_rope_head_dim rows are rotated, so are these rows of `kv_down`, which all heads share; `kv_up` has of each head
    the rows of its key without these, and then those of its value."""

    sizes: LatentSizes
    q: str  # of the hidden rows, or of a normalised latent of the queries
    q_has_bias: bool
    q_down: str | None
    q_norm: NormPlan | None
    kv_down: str
    down_has_bias: bool  # of the linears of the hidden rows
    kv_norm: NormPlan
    kv_up: str  # without a bias
    out: str
    out_has_bias: bool
    query_scale: float  # of the rows of q, before attention
    rotary: RotaryPlan  # of the rotated rows alone

    def rotated_size(self, head_size: int) -> int:
        """See `AttentionPlan`."""
        return self.sizes.qk_rope_head_dim


AnyAttentionPlan = AttentionPlan | LatentPlan


@dataclass(frozen=True, slots=True)
class GatedPlan:
    gate: LinearRows
    up: LinearRows
    has_bias: bool
    down: str
    down_has_bias: bool
    activation: Activation


@dataclass(frozen=True, slots=True)
class PlainPlan:
    """down(activation(up(x)))."""

    up: LinearRows
    has_bias: bool
    down: str
    down_has_bias: bool
    activation: Pointwise


MLPPlan = GatedPlan | PlainPlan


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """A sublayer that stays the model's own module, called with `arguments`."""

    path: str
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Before and after the sublayers of a layer, of what is read and of what is added. None: no norm."""

    input: NormPlan | None = None
    attention_out: NormPlan | None = None
    mlp: NormPlan | None = None
    mlp_out: NormPlan | None = None

    def all(self) -> list[NormPlan]:
        return [norm for norm in (self.input, self.attention_out, self.mlp, self.mlp_out) if norm is not None]


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """hidden += scale * attention(norm(hidden)), then hidden += scale * mlp(norm(hidden)), perhaps with post-norms.

    is_parallel: both are of the same hidden; without a norm of its own the MLP is given the input of attention.
    """

    path: str
    attention: AnyAttentionPlan | ModulePlan
    mlp: MLPPlan | ModulePlan
    norms: LayerNorms = LayerNorms()
    scale: float = 1.0
    is_parallel: bool = False


def of_other_layer(part: Any, layer: str, other: str) -> Any:
    """A plan, or what it consists of, of a layer, as that of another one: by its paths."""
    if isinstance(part, str):
        return other + part[len(layer) :] if part == layer or part.startswith(f"{layer}.") else part
    if isinstance(part, tuple):
        return tuple(of_other_layer(one, layer, other) for one in part)
    if not is_dataclass(part) or isinstance(part, type | Arguments):
        return part
    moved = {one.name: of_other_layer(getattr(part, one.name), layer, other) for one in fields(part)}
    return replace(part, **moved)
