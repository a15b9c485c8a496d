"""Builds the parts of a native family's decoder layer: names in the checkpoint and sizes come from its spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringcore.attention.layer import Attention
from ringcore.checkpoint import Family, ModelSpec
from ringcore.checkpoint.expected_tensors import ROUTER
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.arithmetic import FASTEST, Arithmetic
from ringcore.model_executor.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    merged_outputs,
    qkv_outputs,
)
from ringcore.model_executor.layers.norm import HeadNorm, RMSNorm
from ringcore.model_executor.layers.rotary import interleaved
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.models.decoder_layer import GatedMLP, PostNormed, SelfAttention, Sublayer
from ringcore.model_executor.models.mixture import Experts, Mixture, Router

__all__ = ["LayerBuilder"]


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """What the parts of decoder layer `index` are built from, on one rank; makes its sublayers, norms and linears.

    A part has its name in the layer, and that in the layer of the checkpoint. scheme_of: as the checkpoint has it.
    """

    index: int
    spec: ModelSpec
    tp: TensorParallel
    dtype: torch.dtype
    family: Family
    scheme_of: SchemeOf
    expert_parallel: bool = False
    redundant_experts: int | None = None
    arithmetic: Arithmetic = FASTEST

    def in_model(self, name: str) -> str:
        return f"layers.{self.index}.{name}"

    def in_checkpoint(self, name: str) -> str:
        return f"model.layers.{self.index}.{name}"

    def self_attention(self) -> SelfAttention:
        """On this rank's heads."""
        spec, size = self.spec, self.tp.size
        scale = (spec.query_pre_attn_scalar or spec.head_dim) ** -0.5
        heads = spec.num_heads // size, max(1, spec.num_kv_heads // size)
        window = spec.sliding_windows.get(self.index)
        attention = Attention(self.index, *heads, spec.head_dim, scale, window)
        q, k, v = (self.in_checkpoint(f"self_attn.{name}_proj") for name in "qkv")
        order = tuple(interleaved(spec.head_dim).tolist())
        outputs = qkv_outputs((q, k, v), spec.num_heads, spec.num_kv_heads, spec.head_dim, self.tp, order)
        num_inputs = spec.num_heads * spec.head_dim
        return SelfAttention(
            attention,
            self.column_linear("qkv_proj", outputs, bias=spec.attention_bias),
            self.row_linear("o_proj", "self_attn.o_proj", num_inputs, bias=spec.attention_out_bias),
            # In sliding-window layers that have their own, the second one.
            rotary=int(spec.sliding_rope is not None and self.index in spec.sliding_windows),
            head_norm=self.head_norm(heads, order) if self.family.head_norm else None,
        )

    def mlp(self) -> Sublayer:
        """Or experts in its place."""
        spec, experts = self.spec, self.spec.experts_of(self.index)
        if experts is None:
            return self.gated_mlp()
        names = self.in_model("router"), self.in_checkpoint(ROUTER)
        router = Router(*names, experts, spec.hidden_size, self.dtype, self.arithmetic)
        names = self.in_model("experts"), self.in_checkpoint("mlp")
        size, split, redundant = spec.hidden_size, self.expert_parallel, self.redundant_experts
        given = *names, experts, size, self.dtype, self.tp, split, self.scheme_of, redundant, self.arithmetic
        return Mixture(router, Experts(*given))

    def gated_mlp(self) -> GatedMLP:
        spec = self.spec
        names = self.in_checkpoint("mlp.gate_proj"), self.in_checkpoint("mlp.up_proj")
        outputs = merged_outputs(names, spec.intermediate_size, self.tp)
        return GatedMLP(
            self.column_linear("gate_up_proj", outputs, bias=spec.mlp_bias),
            self.row_linear("down_proj", "mlp.down_proj", spec.intermediate_size, bias=spec.mlp_bias),
            self.family.activation,
        )

    def norm(self, name: str, checkpoint_name: str) -> RMSNorm:
        """Over the hidden size."""
        names = self.in_model(name), self.in_checkpoint(checkpoint_name)
        size, eps, plus_one = self.spec.hidden_size, self.spec.rms_norm_eps, self.family.norm_plus_one
        return RMSNorm(*names, size, eps, self.dtype, plus_one=plus_one)

    def head_norm(self, num_heads: tuple[int, int], order: tuple[int, ...]) -> HeadNorm:
        """num_heads: of q and of k; order: of the entries of a head, as in `WeightPart`."""
        spec, norms = self.spec, self.family.norms
        return HeadNorm(
            self.in_model("head_norm"),
            (self.in_checkpoint(norms.query), self.in_checkpoint(norms.key)),
            num_heads,
            spec.head_dim,
            spec.rms_norm_eps,
            self.dtype,
            order,
            plus_one=self.family.norm_plus_one,
        )

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
            scheme_of=self.arithmetic.schemes(self.scheme_of),
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
            scheme_of=self.arithmetic.schemes(self.scheme_of),
        )
