"""One layer of a decoder: two sublayers, attention and an MLP, each behind a norm. Both are arguments: a family
composes its layers of those below and its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringcore.attention.context import ForwardContext
from ringcore.attention.layer import AnyAttention, Attention
from ringcore.checkpoint.family import Activation
from ringcore.kernels.partials import Partials
from ringcore.model_executor.layers.activation import BoundGate, Pointwise, bind_activation, pointwise
from ringcore.model_executor.layers.layer_norm import LayerNorm
from ringcore.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from ringcore.model_executor.layers.norm import AnyNorm, HeadNorm, QKNorm, RMSNorm, Unnormed
from ringcore.model_executor.layers.rotary import Rotation
from ringcore.model_executor.layers.sinks import AttentionSinks
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = [
    "DecoderLayer",
    "GatedMLP",
    "LayerInputs",
    "ParallelLayer",
    "PlainMLP",
    "PostNormed",
    "ProjectedSublayer",
    "SelfAttention",
    "Sublayer",
]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What the layers of one step read besides the residual stream."""

    ctx: ForwardContext
    rotations: Sequence[Rotation]  # by rotary embedding


class Sublayer(ABC):
    """Attention, an MLP, or what a family has in place of one."""

    @abstractmethod
    def layers(self) -> list[WeightedLayer]: ...

    @abstractmethod
    def __call__(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        """hidden: [n, hidden_size], normalised by `norm` first -> the contribution to it: [n, hidden_size], equal on
        every rank."""

    def unreduced(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> Partials:
        """As self(norm, hidden, inputs), whose splits are yet to be added."""
        return Partials(self(norm, hidden, inputs)[None])

    def add_to(self, stream: Residual, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> None:
        """stream += self(norm, hidden, inputs), fused where there is a kernel for it. hidden: the stream, or other rows
        which are not changed."""
        contribution = self(norm, hidden, inputs)
        stream.rows.add_(contribution)

    def attention_layers(self) -> list[AnyAttention]:
        """Those with a KV cache."""
        return []

    def bind_device(self, device: torch.device) -> None:  # noqa: B027 - most have weights from which they infer it
        """Called after the weights are bound."""


class ProjectedSublayer(Sublayer):
    """One that ends in a linear."""

    def __init__(self, out_proj: RowParallelLinear) -> None:
        self._out_proj = out_proj

    @abstractmethod
    def _before(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        """Its input: [n, this rank's share]."""

    def __call__(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        return self._out_proj(self._before(norm, hidden, inputs), inputs.ctx.tokens)

    def unreduced(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> Partials:
        return self._out_proj.unreduced(self._before(norm, hidden, inputs), inputs.ctx.tokens)

    def add_to(self, stream: Residual, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> None:
        self._out_proj.add_to(stream, self._before(norm, hidden, inputs), inputs.ctx.tokens)


class SelfAttention(ProjectedSublayer):
    """Projections, rotary embedding and attention of one layer, on this rank's heads."""

    def __init__(
        self,
        attention: Attention,
        qkv_proj: ColumnParallelLinear,
        o_proj: RowParallelLinear,
        *,
        rotary: int,
        head_norm: HeadNorm | None = None,
        qk_norm: QKNorm | None = None,
        sinks: AttentionSinks | None = None,
    ) -> None:
        """qkv_proj: the heads of q, of k and of v, the pairs that are rotated interleaved. rotary: the index of the
        rotary embedding. head_norm, qk_norm: of each head alone, of all heads together; at most one of them."""
        super().__init__(o_proj)
        self.attention, self.qkv_proj, self.o_proj = attention, qkv_proj, o_proj
        self.rotary, self.head_norm, self.qk_norm, self.sinks = rotary, head_norm, qk_norm, sinks

    def layers(self) -> list[WeightedLayer]:
        optional = [part for part in (self.head_norm, self.qk_norm, self.sinks) if part is not None]
        return [self.qkv_proj, *optional, self.o_proj]

    def attention_layers(self) -> list[AnyAttention]:
        return [self.attention]

    def _before(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        """[n, num_heads * head_dim]."""
        ctx = inputs.ctx
        qkv = self.qkv_proj.after_norm(norm, hidden, ctx.tokens)
        if self.qk_norm is not None:
            self.qk_norm(qkv)
        sinks = None if self.sinks is None else self.sinks.values
        rotate = inputs.rotations[self.rotary]
        rotation = rotate.of_heads(self.head_norm)
        if rotation is not None and self.attention.rotates(ctx):
            return self.attention.of_projection(qkv, rotation, ctx, sinks).flatten(1)
        kv_target = self.attention.kv_write_target(ctx)
        heads = self.attention.num_heads, self.attention.num_kv_heads
        q, k, v = rotate(qkv, *heads, self.head_norm, kv_target)
        return self.attention(q, k, v, ctx, sinks).reshape(len(hidden), -1)


class GatedMLP(ProjectedSublayer):
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, gate_up_proj: ColumnParallelLinear, down_proj: RowParallelLinear, activation: Activation
    ) -> None:
        super().__init__(down_proj)
        self.gate_up_proj, self.down_proj = gate_up_proj, down_proj
        self.activation = activation
        self._gate: BoundGate

    def layers(self) -> list[WeightedLayer]:
        return [self.gate_up_proj, self.down_proj]

    def bind_device(self, device: torch.device) -> None:
        self._gate = bind_activation(self.activation, device)

    def _before(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        return self.gate_up_proj.gated_after_norm(norm, hidden, self._gate, inputs.ctx.tokens)


class PlainMLP(ProjectedSublayer):
    """down(activation(up(x))), without a gate."""

    def __init__(self, up_proj: ColumnParallelLinear, down_proj: RowParallelLinear, activation: Pointwise) -> None:
        super().__init__(down_proj)
        self.up_proj, self.down_proj, self._activate = up_proj, down_proj, pointwise(activation)

    def layers(self) -> list[WeightedLayer]:
        return [self.up_proj, self.down_proj]

    def _before(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        return self._activate(self.up_proj.after_norm(norm, hidden, inputs.ctx.tokens))


class PostNormed(Sublayer):
    """A sublayer whose contribution is normalised before it is added (post-norm)."""

    def __init__(self, inner: Sublayer, out_norm: RMSNorm | LayerNorm) -> None:
        self.inner = inner
        self.out_norm = out_norm

    def layers(self) -> list[WeightedLayer]:
        return [*self.inner.layers(), self.out_norm]

    def attention_layers(self) -> list[AnyAttention]:
        return self.inner.attention_layers()

    def bind_device(self, device: torch.device) -> None:
        self.inner.bind_device(device)

    def __call__(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        return self.out_norm(self.inner(norm, hidden, inputs))

    def add_to(self, stream: Residual, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> None:
        self.out_norm.add_to(stream, self.inner.unreduced(norm, hidden, inputs))


class DecoderLayer:
    """hidden += attention(norm(hidden)), then hidden += mlp(norm(hidden)).

    A norm is the prologue of the linear after it, a residual add the epilogue of the linear before it: for few rows on
    a GPU each pair is one fused kernel. For more rows a residual add may be deferred to the next norm: of split-K
    partials, or of their norm.
    """

    def __init__(self, input_norm: AnyNorm, self_attention: Sublayer, mlp_norm: AnyNorm, mlp: Sublayer) -> None:
        self.input_norm = input_norm
        self.self_attention = self_attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def layers(self) -> list[WeightedLayer]:
        return [self.input_norm, *self.self_attention.layers(), self.mlp_norm, *self.mlp.layers()]

    def attention_layers(self) -> list[AnyAttention]:
        return [*self.self_attention.attention_layers(), *self.mlp.attention_layers()]

    def bind_device(self, device: torch.device) -> None:
        self.self_attention.bind_device(device)
        self.mlp.bind_device(device)

    def __call__(self, hidden: Residual, inputs: LayerInputs) -> None:
        """Adds the contributions of attention and the MLP to `hidden` [n, hidden_size]."""
        self.self_attention.add_to(hidden, self.input_norm, hidden, inputs)
        self.mlp.add_to(hidden, self.mlp_norm, hidden, inputs)


class ParallelLayer(DecoderLayer):
    """hidden += attention(norm(hidden)) + mlp(norm(hidden)), both of the same hidden.

    The norms are operations of their own here: what is added first would change what the other one reads.
    """

    def __init__(
        self,
        input_norm: RMSNorm | LayerNorm,
        self_attention: Sublayer,
        mlp_norm: RMSNorm | LayerNorm | None,
        mlp: Sublayer,
        as_is: Unnormed,
    ) -> None:
        """mlp_norm: None where both read the result of one norm. as_is: for the results of the norms."""
        super().__init__(input_norm, self_attention, mlp_norm or input_norm, mlp)
        self._has_one_norm, self._as_is = mlp_norm is None, as_is

    def layers(self) -> list[WeightedLayer]:
        norms = [self.input_norm] if self._has_one_norm else [self.input_norm, self.mlp_norm]
        return [*norms, *self.self_attention.layers(), *self.mlp.layers()]

    def __call__(self, hidden: Residual, inputs: LayerInputs) -> None:
        of_attention = Residual(hidden.normed(self.input_norm))
        of_mlp = of_attention if self._has_one_norm else Residual(hidden.normed(self.mlp_norm))
        self.self_attention.add_to(hidden, self._as_is, of_attention, inputs)
        self.mlp.add_to(hidden, self._as_is, of_mlp, inputs)
