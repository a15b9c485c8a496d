"""One layer of a decoder: two sublayers, attention and an MLP, each behind a norm. Both are arguments: a family
composes its layers of those below and its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringcore.attention.context import ForwardContext
from ringcore.attention.layer import Attention
from ringcore.checkpoint import Family, ModelSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.activation import BoundGate, bind_activation
from ringcore.model_executor.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    merged_outputs,
    qkv_outputs,
)
from ringcore.model_executor.layers.norm import HeadNorm, RMSNorm
from ringcore.model_executor.layers.rotary import Rotation, interleaved
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = [
    "DecoderLayer",
    "GatedMLP",
    "LayerBuilder",
    "LayerInputs",
    "PostNormed",
    "SelfAttention",
    "Sublayer",
]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What the layers of one step read besides the residual stream."""

    ctx: ForwardContext
    rotations: Sequence[Rotation]  # by rotary embedding: see `LayerBuilder.rotary`


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """What the parts of decoder layer `index` are built from, on one rank; makes its norms and linears.

    A part has its name in the layer, and that in the layer of the checkpoint.
    """

    index: int
    spec: ModelSpec
    tp: TensorParallel
    dtype: torch.dtype
    family: Family
    scheme_of: SchemeOf

    def in_model(self, name: str) -> str:
        return f"layers.{self.index}.{name}"

    def in_checkpoint(self, name: str) -> str:
        return f"model.layers.{self.index}.{name}"

    @property
    def rotary(self) -> int:
        """The index of the layer's rotary embedding: 1 in sliding-window layers that have their own."""
        return int(self.spec.sliding_rope is not None and self.index in self.spec.sliding_windows)

    def norm(self, name: str, checkpoint_name: str) -> RMSNorm:
        """Over the hidden size."""
        names = self.in_model(name), self.in_checkpoint(checkpoint_name)
        plus_one = self.family.norm_plus_one
        return RMSNorm(*names, self.spec.hidden_size, self.spec.rms_norm_eps, self.dtype, plus_one=plus_one)

    def post_normed(self, inner: Sublayer, name: str, checkpoint_name: str | None) -> Sublayer:
        """With a post-norm where the family has one."""
        return inner if checkpoint_name is None else PostNormed(inner, self.norm(name, checkpoint_name))

    def column_linear(self, name: str, outputs: Sequence[OutputSlice], *, bias: bool) -> ColumnParallelLinear:
        """From the hidden size; outputs: see `merged_outputs` and `qkv_outputs`."""
        return ColumnParallelLinear(
            self.in_model(name),
            outputs,
            self.spec.hidden_size,
            bias=bias,
            dtype=self.dtype,
            scheme_of=self.scheme_of,
        )

    def row_linear(self, name: str, checkpoint_name: str, num_inputs: int, *, bias: bool) -> RowParallelLinear:
        """To the hidden size."""
        return RowParallelLinear(
            self.in_model(name),
            self.in_checkpoint(checkpoint_name),
            num_inputs,
            self.spec.hidden_size,
            bias=bias,
            dtype=self.dtype,
            tp=self.tp,
            scheme_of=self.scheme_of,
        )


class Sublayer(ABC):
    """Attention, an MLP, or what a family has in place of one."""

    @abstractmethod
    def layers(self) -> list[WeightedLayer]: ...

    @abstractmethod
    def __call__(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        """hidden: [n, hidden_size], normalised by `norm` first -> the contribution to it: [n, hidden_size], equal on
        every rank."""

    def add_to(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> None:
        """hidden += self(norm, hidden, inputs), fused where there is a kernel for it."""
        hidden.rows.add_(self(norm, hidden, inputs))

    def attention_layers(self) -> list[Attention]:
        """Those with a KV cache."""
        return []

    def bind_device(self, device: torch.device) -> None:  # noqa: B027 - most have weights from which they infer it
        """Called after the weights are bound."""


class SelfAttention(Sublayer):
    """Projections, rotary embedding and attention of one layer, on this rank's heads."""

    def __init__(self, build: LayerBuilder) -> None:
        spec, size, norms = build.spec, build.tp.size, build.family.norms
        self.head_dim = spec.head_dim
        self.num_heads = spec.num_heads // size
        self.num_kv_heads = max(1, spec.num_kv_heads // size)
        self.rotary = build.rotary
        scale = (spec.query_pre_attn_scalar or spec.head_dim) ** -0.5
        window = spec.sliding_windows.get(build.index)
        self.attention = Attention(build.index, self.num_heads, self.num_kv_heads, self.head_dim, scale, window)
        q, k, v = (build.in_checkpoint(f"self_attn.{name}_proj") for name in "qkv")
        order = tuple(interleaved(spec.head_dim).tolist())
        outputs = qkv_outputs((q, k, v), spec.num_heads, spec.num_kv_heads, spec.head_dim, build.tp, order)
        self.qkv_proj = build.column_linear("qkv_proj", outputs, bias=spec.attention_bias)
        self.head_norm: HeadNorm | None = None
        if build.family.head_norm:
            self.head_norm = HeadNorm(
                build.in_model("head_norm"),
                (build.in_checkpoint(norms.query), build.in_checkpoint(norms.key)),
                (self.num_heads, self.num_kv_heads),
                spec.head_dim,
                spec.rms_norm_eps,
                build.dtype,
                order,
                plus_one=build.family.norm_plus_one,
            )
        num_inputs = spec.num_heads * spec.head_dim
        self.o_proj = build.row_linear("o_proj", "self_attn.o_proj", num_inputs, bias=spec.attention_out_bias)

    def layers(self) -> list[WeightedLayer]:
        return [self.qkv_proj, *([self.head_norm] if self.head_norm else []), self.o_proj]

    def attention_layers(self) -> list[Attention]:
        return [self.attention]

    def _attended(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        """The input of `o_proj`: [n, num_heads * head_dim]."""
        ctx = inputs.ctx
        qkv = self.qkv_proj.after_norm(norm, hidden, ctx.tokens)
        kv_target = self.attention.kv_write_target(ctx)
        q, k, v = inputs.rotations[self.rotary](qkv, self.num_heads, self.num_kv_heads, self.head_norm, kv_target)
        return self.attention(q, k, v, ctx).reshape(len(hidden), -1)

    def __call__(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        return self.o_proj(self._attended(norm, hidden, inputs), inputs.ctx.tokens)

    def add_to(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> None:
        self.o_proj.add_to(hidden, self._attended(norm, hidden, inputs), inputs.ctx.tokens)


class GatedMLP(Sublayer):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, build: LayerBuilder) -> None:
        spec = build.spec
        self._activation = build.family.activation
        self._gate: BoundGate
        names = build.in_checkpoint("mlp.gate_proj"), build.in_checkpoint("mlp.up_proj")
        outputs = merged_outputs(names, spec.intermediate_size, build.tp)
        self.gate_up_proj = build.column_linear("gate_up_proj", outputs, bias=spec.mlp_bias)
        self.down_proj = build.row_linear("down_proj", "mlp.down_proj", spec.intermediate_size, bias=spec.mlp_bias)

    def layers(self) -> list[WeightedLayer]:
        return [self.gate_up_proj, self.down_proj]

    def bind_device(self, device: torch.device) -> None:
        self._gate = bind_activation(self._activation, device)

    def _gated(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        """The input of `down_proj`: [n, this rank's share]."""
        return self.gate_up_proj.gated_after_norm(norm, hidden, self._gate, inputs.ctx.tokens)

    def __call__(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        return self.down_proj(self._gated(norm, hidden, inputs), inputs.ctx.tokens)

    def add_to(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> None:
        self.down_proj.add_to(hidden, self._gated(norm, hidden, inputs), inputs.ctx.tokens)


class PostNormed(Sublayer):
    """A sublayer whose contribution is normalised before it is added (post-norm)."""

    def __init__(self, inner: Sublayer, out_norm: RMSNorm) -> None:
        self.inner = inner
        self.out_norm = out_norm

    def layers(self) -> list[WeightedLayer]:
        return [*self.inner.layers(), self.out_norm]

    def attention_layers(self) -> list[Attention]:
        return self.inner.attention_layers()

    def bind_device(self, device: torch.device) -> None:
        self.inner.bind_device(device)

    def __call__(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        return self.out_norm(self.inner(norm, hidden, inputs))

    def add_to(self, norm: RMSNorm, hidden: Residual, inputs: LayerInputs) -> None:
        self.out_norm.add_to(hidden, self.inner(norm, hidden, inputs))


class DecoderLayer:
    """hidden += attention(norm(hidden)), then hidden += mlp(norm(hidden)).

    A norm is the prologue of the linear after it, a residual add the epilogue of the linear before it: for few rows on
    a GPU each pair is one fused kernel. For more rows a residual add may be deferred to the next norm (split-K
    partials).
    """

    def __init__(self, input_norm: RMSNorm, self_attention: Sublayer, mlp_norm: RMSNorm, mlp: Sublayer) -> None:
        self.input_norm = input_norm
        self.self_attention = self_attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def layers(self) -> list[WeightedLayer]:
        return [self.input_norm, *self.self_attention.layers(), self.mlp_norm, *self.mlp.layers()]

    def attention_layers(self) -> list[Attention]:
        return [*self.self_attention.attention_layers(), *self.mlp.attention_layers()]

    def bind_device(self, device: torch.device) -> None:
        self.self_attention.bind_device(device)
        self.mlp.bind_device(device)

    def __call__(self, hidden: Residual, inputs: LayerInputs) -> None:
        """Adds the contributions of attention and the MLP to `hidden` [n, hidden_size]."""
        self.self_attention.add_to(self.input_norm, hidden, inputs)
        self.mlp.add_to(self.mlp_norm, hidden, inputs)
