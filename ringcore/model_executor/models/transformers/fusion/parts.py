"""Our layers that compute what a plan says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ringcore.attention.layer import Attention, LatentAttention
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.latent_heads import LatentHeads
from ringcore.model_executor.layers.layer_norm import LayerNorm
from ringcore.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from ringcore.model_executor.layers.norm import AnyNorm, HeadNorm, QKNorm, RMSNorm, Unnormed
from ringcore.model_executor.layers.sinks import AttentionSinks
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.shard import OutputSlice
from ringcore.model_executor.models.decoder_layer import (
    DecoderLayer,
    GatedMLP,
    ParallelLayer,
    PlainMLP,
    PostNormed,
    SelfAttention,
    Sublayer,
)
from ringcore.model_executor.models.latent_self_attention import LatentSelfAttention
from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.fusion.module_sublayer import ModuleSublayer
from ringcore.model_executor.models.transformers.fusion.plan import (
    AnyAttentionPlan,
    AttentionPlan,
    GatedPlan,
    LatentPlan,
    LayerPlan,
    LinearRows,
    MLPPlan,
    ModulePlan,
    NormPlan,
    PlainPlan,
)

__all__ = ["Parts", "local_attention"]


@dataclass(frozen=True, slots=True)
class Parts:
    """What our layers are made of, on one rank. hidden_size: of the residual stream, which is in units of `scale`, so
    that what is added needs no factor; a norm sees that in its eps alone.

    names: of the checkpoint's tensors, by those of the body's. modules: those of the body, by path.
    """

    names: Mapping[str, str]
    modules: Mapping[str, nn.Module]
    hidden_size: int
    dtype: torch.dtype
    tp: TensorParallel
    scheme_of: SchemeOf
    scale: float = 1.0

    def layer(self, plan: LayerPlan, call: AttentionCall, index: int = 0, rotary: int = 0) -> DecoderLayer:
        """call: of the whole model. rotary: see `SelfAttention`."""
        attention: Sublayer
        if isinstance(plan.attention, ModulePlan):
            attention = self.module(plan.attention)
        else:
            attention = self.attention(plan.path, plan.attention, call, index, rotary)
        own = self.module(plan.mlp) if isinstance(plan.mlp, ModulePlan) else self.mlp(plan.path, plan.mlp)
        attention, mlp = (
            self._post_normed(attention, plan.norms.attention_out),
            self._post_normed(own, plan.norms.mlp_out),
        )
        if not plan.is_parallel:
            return DecoderLayer(self.prologue(plan.norms.input), attention, self.prologue(plan.norms.mlp), mlp)
        assert plan.norms.input is not None, plan
        mlp_norm = None if plan.norms.mlp is None else self._of_stream(plan.norms.mlp)
        return ParallelLayer(self._of_stream(plan.norms.input), attention, mlp_norm, mlp, Unnormed(self.dtype))

    def attention(
        self, path: str, plan: AnyAttentionPlan, call: AttentionCall, index: int = 0, rotary: int = 0
    ) -> SelfAttention | LatentSelfAttention:
        """call: of the whole model. index: of the attention layer. rotary: see `SelfAttention`."""
        if isinstance(plan, LatentPlan):
            return self._of_latents(path, plan, call, index, rotary)
        return self._of_heads(path, plan, call, index, rotary)

    def _of_latents(
        self, path: str, plan: LatentPlan, call: AttentionCall, index: int, rotary: int
    ) -> LatentSelfAttention:
        sizes, tp = plan.sizes, self.tp
        rank, rope, rotated = sizes.kv_lora_rank, sizes.qk_rope_head_dim, plan.rotary.order(sizes.qk_rope_head_dim)
        of_head = (*range(sizes.qk_nope_head_dim), *(sizes.qk_nope_head_dim + entry for entry in rotated))

        def of_heads(path: str, size: int, order: tuple[int, ...] | None = None) -> OutputSlice:
            length = call.num_heads * size // tp.size
            return OutputSlice(self._matrix(path), call.num_heads * size, tp.rank * length, length, order)

        latent = OutputSlice(self._matrix(plan.kv_down), rank + rope, 0, rank)
        row = [latent, replace(latent, start=rank, length=rope, order=rotated)]
        down = queries = of_heads(plan.q, call.head_size, of_head)
        q_norm, q_up_proj = None, None
        if plan.q_down is not None and plan.q_norm is not None:
            q_norm, q_rank = self.rms_norm(plan.q_norm), plan.q_norm.size
            down = OutputSlice(self._matrix(plan.q_down), q_rank, 0, q_rank)
            q_up_proj = self._column(f"{path}.q_b_proj", [queries], plan.q_has_bias, q_rank)
        both = sizes.qk_nope_head_dim, sizes.v_head_dim
        up = of_heads(plan.kv_up, sum(both))
        return LatentSelfAttention(
            LatentAttention(index, call.num_heads // tp.size, rank, rope, *both, call.scale * plan.query_scale),
            self._column(f"{path}.qkv_a_proj", [down, *row], plan.down_has_bias),
            self.rms_norm(plan.kv_norm),
            LatentHeads(f"{path}.kv_b_proj", [up], rank, *both, self.dtype, self.scheme_of),
            self._row(f"{path}.o_proj", plan.out, call.num_heads * sizes.v_head_dim, plan.out_has_bias),
            rotary=rotary,
            q_norm=q_norm,
            q_up_proj=q_up_proj,
        )

    def _of_heads(self, path: str, plan: AttentionPlan, call: AttentionCall, index: int, rotary: int) -> SelfAttention:
        size, rank, head_size = self.tp.size, self.tp.rank, call.head_size
        order = tuple(range(head_size)) if plan.rotary is None else plan.rotary.order(head_size)
        heads, kv_heads = call.num_heads // size, max(1, call.num_kv_heads // size)
        first, first_kv = rank * heads, rank * call.num_kv_heads // size
        outputs = [
            *self._slices(plan.q[first : first + heads], order),
            *self._slices(plan.k[first_kv : first_kv + kv_heads], order),
            *self._slices(plan.v[first_kv : first_kv + kv_heads], None),
        ]
        head_norm, qk_norm = None, None
        if plan.qk_norms is not None:
            qk_norm = self._qk_norm(path, plan.qk_norms, (heads * head_size, kv_heads * head_size), order)
            if plan.qk_norms[0].size == head_size:
                head_norm, qk_norm = self._head_norm(path, plan.qk_norms, (heads, kv_heads), order), None
        sinks = None
        if plan.sinks is not None:
            name = self.names[plan.sinks]
            sinks = AttentionSinks(f"{path}.sinks", name, call.num_heads, self.dtype, self.tp)
        num_inputs = call.num_heads * head_size
        return SelfAttention(
            local_attention(replace(call, scale=call.scale * plan.query_scale), index, heads, kv_heads),
            self._column(f"{path}.qkv_proj", outputs, plan.has_bias),
            self._row(f"{path}.o_proj", plan.out, num_inputs, plan.out_has_bias),
            rotary=rotary,
            head_norm=head_norm,
            qk_norm=qk_norm,
            sinks=sinks,
        )

    def mlp(self, path: str, plan: MLPPlan) -> GatedMLP | PlainMLP:
        return self._gated(path, plan) if isinstance(plan, GatedPlan) else self._plain(path, plan)

    def _plain(self, path: str, plan: PlainPlan) -> PlainMLP:
        up, length = plan.up, plan.up.length // self.tp.size
        outputs = [OutputSlice(self._matrix(up.path), up.num_outputs, self.tp.rank * length, length)]
        return PlainMLP(
            self._column(f"{path}.up_proj", outputs, plan.has_bias),
            self._row(f"{path}.down_proj", plan.down, up.length, plan.down_has_bias),
            plan.activation,
        )

    def _gated(self, path: str, plan: GatedPlan) -> GatedMLP:
        length = plan.gate.length // self.tp.size
        outputs = [
            OutputSlice(self._matrix(half.path), half.num_outputs, half.start + self.tp.rank * length, length)
            for half in (plan.gate, plan.up)
        ]
        return GatedMLP(
            self._column(f"{path}.gate_up_proj", outputs, plan.has_bias),
            self._row(f"{path}.down_proj", plan.down, plan.gate.length, plan.down_has_bias),
            plan.activation,
        )

    def module(self, plan: ModulePlan) -> ModuleSublayer:
        return ModuleSublayer(self.modules[plan.path], plan.arguments)

    def prologue(self, plan: NormPlan | None) -> AnyNorm:
        """The norm of the residual stream before a sublayer."""
        return Unnormed(self.dtype) if plan is None else self._of_stream(plan)

    def _of_stream(self, plan: NormPlan) -> RMSNorm | LayerNorm:
        return self.norm(plan, plan.eps / self.scale**2)

    def _post_normed(self, inner: Sublayer, plan: NormPlan | None) -> Sublayer:
        return inner if plan is None else PostNormed(inner, self.norm(plan))

    def norm(self, plan: NormPlan, eps: float | None = None) -> RMSNorm | LayerNorm:
        """eps: another one than the plan's."""
        eps = plan.eps if eps is None else eps
        if plan.is_centred:
            weight = self.names[f"{plan.path}.weight"] if plan.has_weight else None
            bias = self.names[f"{plan.path}.bias"] if plan.has_bias else None
            return LayerNorm(plan.path, (weight, bias), plan.size, eps, self.dtype, plus_one=plan.plus_one)
        return self.rms_norm(plan, eps)

    def rms_norm(self, plan: NormPlan, eps: float | None = None) -> RMSNorm:
        """As `norm`, of a plan that is not centred."""
        eps = plan.eps if eps is None else eps
        return RMSNorm(plan.path, self._matrix(plan.path), plan.size, eps, self.dtype, plus_one=plan.plus_one)

    def _head_norm(
        self, path: str, norms: tuple[NormPlan, NormPlan], num_heads: tuple[int, int], order: tuple[int, ...]
    ) -> HeadNorm:
        names = self._matrix(norms[0].path), self._matrix(norms[1].path)
        size, eps, plus_one = norms[0].size, norms[0].eps, norms[0].plus_one
        return HeadNorm(f"{path}.head_norm", names, num_heads, size, eps, self.dtype, order, plus_one=plus_one)

    def _qk_norm(
        self, path: str, norms: tuple[NormPlan, NormPlan], sizes: tuple[int, int], order: tuple[int, ...]
    ) -> QKNorm:
        names = self._matrix(norms[0].path), self._matrix(norms[1].path)
        return QKNorm(f"{path}.qk_norm", names, sizes, norms[0].eps, self.dtype, order, plus_one=norms[0].plus_one)

    def _slices(self, heads: Sequence[LinearRows], order: tuple[int, ...] | None) -> list[OutputSlice]:
        """Of the heads of q, k or v: neighbours in one slice."""
        slices: list[OutputSlice] = []
        for rows in heads:
            name, last = self._matrix(rows.path), slices[-1] if slices else None
            if last is not None and (last.checkpoint_name, last.start + last.length) == (name, rows.start):
                slices[-1] = replace(last, length=last.length + rows.length)
            else:
                slices.append(OutputSlice(name, rows.num_outputs, rows.start, rows.length, order))
        return slices

    def _column(
        self, name: str, outputs: Sequence[OutputSlice], has_bias: bool, num_inputs: int | None = None
    ) -> ColumnParallelLinear:
        """num_inputs: None: the hidden rows."""
        return ColumnParallelLinear(
            name, outputs, num_inputs or self.hidden_size, bias=has_bias, dtype=self.dtype, scheme_of=self.scheme_of
        )

    def _row(self, name: str, path: str, num_inputs: int, has_bias: bool) -> RowParallelLinear:
        return RowParallelLinear(
            name,
            self._matrix(path),
            num_inputs,
            self.hidden_size,
            bias=has_bias,
            dtype=self.dtype,
            tp=self.tp,
            scheme_of=self.scheme_of,
        )

    def _matrix(self, path: str) -> str:
        """The name of a module's weight in the checkpoint, without ".weight"."""
        return self.names[f"{path}.weight"].removesuffix(".weight")


def local_attention(call: AttentionCall, index: int, num_heads: int, num_kv_heads: int) -> Attention:
    """The attention of a call, on a rank's heads."""
    return Attention(
        index,
        num_heads,
        num_kv_heads,
        call.head_size,
        call.scale,
        call.sliding_window,
        call.chunk_size,
        v_head_size=call.v_head_size,
        softcap=call.softcap,
        has_sinks=call.has_sinks,
    )
