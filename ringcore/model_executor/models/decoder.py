"""The dense decoder that all families share: pre-norm, rotary attention over KV heads, a gated MLP."""

from __future__ import annotations

from typing import ClassVar

import torch

from ringcore.attention.context import ForwardContext
from ringcore.attention.layer import Attention
from ringcore.checkpoint import Family, ModelSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.activation import BoundGate, bind_activation
from ringcore.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ringcore.model_executor.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    merged_outputs,
    qkv_outputs,
)
from ringcore.model_executor.layers.norm import HeadNorm, RMSNorm
from ringcore.model_executor.layers.rotary import RotaryEmbedding, Rotation, interleaved
from ringcore.model_executor.models.base import CausalLM
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import Tensors, Weight, WeightedLayer

__all__ = ["DecoderLayer", "DenseDecoder", "layer_norm"]


class SelfAttention:
    """Projections, rotary embedding and attention of one layer, on this rank's heads."""

    def __init__(self, index: int, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, family: Family) -> None:
        name, checkpoint_name = f"layers.{index}", f"model.layers.{index}.self_attn"
        head_dim = spec.head_dim
        self.num_heads = spec.num_heads // tp.size
        self.num_kv_heads = max(1, spec.num_kv_heads // tp.size)
        self.head_dim = head_dim
        scale = (spec.query_pre_attn_scalar or head_dim) ** -0.5
        window = spec.sliding_windows.get(index)
        self.attention = Attention(index, self.num_heads, self.num_kv_heads, head_dim, scale, window)
        names = (f"{checkpoint_name}.q_proj", f"{checkpoint_name}.k_proj", f"{checkpoint_name}.v_proj")
        order = tuple(interleaved(head_dim).tolist())
        self.qkv_proj = ColumnParallelLinear(
            f"{name}.qkv_proj",
            qkv_outputs(names, spec.num_heads, spec.num_kv_heads, head_dim, tp, order),
            spec.hidden_size,
            bias=spec.attention_bias,
            dtype=dtype,
        )
        self.head_norm: HeadNorm | None = None
        if family.head_norm:
            self.head_norm = HeadNorm(
                f"{name}.head_norm",
                (f"model.layers.{index}.{family.norms.query}", f"model.layers.{index}.{family.norms.key}"),
                (self.num_heads, self.num_kv_heads),
                head_dim,
                spec.rms_norm_eps,
                dtype,
                order,
                plus_one=family.norm_plus_one,
            )
        self.o_proj = RowParallelLinear(
            f"{name}.o_proj",
            f"{checkpoint_name}.o_proj",
            spec.num_heads * head_dim,
            spec.hidden_size,
            bias=spec.attention_out_bias,
            dtype=dtype,
            tp=tp,
        )

    def layers(self) -> list[WeightedLayer]:
        return [self.qkv_proj, *([self.head_norm] if self.head_norm else []), self.o_proj]

    def __call__(self, norm: RMSNorm, hidden: Residual, rotation: Rotation, ctx: ForwardContext) -> torch.Tensor:
        """hidden: [n, hidden_size], normalised by `norm` first -> the input of `o_proj`: [n, num_heads * head_dim]."""
        qkv = self.qkv_proj.after_norm(norm, hidden)
        kv_target = self.attention.kv_write_target(ctx)
        q, k, v = rotation(qkv, self.num_heads, self.num_kv_heads, self.head_norm, kv_target)
        return self.attention(q, k, v, ctx).reshape(len(hidden), -1)


class MLP:
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, index: int, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, family: Family) -> None:
        name, checkpoint_name = f"layers.{index}", f"model.layers.{index}.mlp"
        self._activation = family.activation
        self._gate: BoundGate
        self.gate_up_proj = ColumnParallelLinear(
            f"{name}.gate_up_proj",
            merged_outputs((f"{checkpoint_name}.gate_proj", f"{checkpoint_name}.up_proj"), spec.intermediate_size, tp),
            spec.hidden_size,
            bias=spec.mlp_bias,
            dtype=dtype,
        )
        self.down_proj = RowParallelLinear(
            f"{name}.down_proj",
            f"{checkpoint_name}.down_proj",
            spec.intermediate_size,
            spec.hidden_size,
            bias=spec.mlp_bias,
            dtype=dtype,
            tp=tp,
        )

    def layers(self) -> list[WeightedLayer]:
        return [self.gate_up_proj, self.down_proj]

    def bind_activation(self, device: torch.device) -> None:
        """The activation has no weights from which it could infer its device."""
        self._gate = bind_activation(self._activation, device)

    def __call__(self, norm: RMSNorm, hidden: Residual) -> torch.Tensor:
        """hidden: [n, hidden_size], normalised by `norm` first -> the input of `down_proj`: [n, this rank's share]."""
        return self.gate_up_proj.gated_after_norm(norm, hidden, self._gate)


class DecoderLayer:
    def __init__(self, index: int, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, family: Family) -> None:
        self.input_norm = layer_norm(index, "input_norm", family.norms.input, spec, dtype, family)
        self.self_attention = SelfAttention(index, spec, tp, dtype, family)
        self.mlp_norm = layer_norm(index, "mlp_norm", family.norms.mlp, spec, dtype, family)
        self.mlp = MLP(index, spec, tp, dtype, family)

    def layers(self) -> list[WeightedLayer]:
        return [self.input_norm, *self.self_attention.layers(), self.mlp_norm, *self.mlp.layers()]

    def __call__(self, hidden: Residual, rotation: Rotation, ctx: ForwardContext) -> None:
        """Adds the contributions of attention and the MLP to `hidden` [n, hidden_size].

        A norm is the prologue of the linear after it, a residual add the epilogue of the linear before it: for few rows
        on a GPU each pair is one fused kernel. For more rows a residual add may be deferred to the next norm (split-K
        partials).
        """
        attended = self.self_attention(self.input_norm, hidden, rotation, ctx)
        self.self_attention.o_proj.add_to(hidden, attended)
        self.mlp.down_proj.add_to(hidden, self.mlp(self.mlp_norm, hidden))


def layer_norm(
    index: int, name: str, checkpoint_name: str, spec: ModelSpec, dtype: torch.dtype, family: Family
) -> RMSNorm:
    """A norm of layer `index` over the hidden size."""
    return RMSNorm(
        f"layers.{index}.{name}",
        f"model.layers.{index}.{checkpoint_name}",
        spec.hidden_size,
        spec.rms_norm_eps,
        dtype,
        plus_one=family.norm_plus_one,
    )


class DenseDecoder(CausalLM):
    """The whole model; a family sets its record and, where a layer computes something else, the class of its layers."""

    family: ClassVar[Family]
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer

    def __init__(self, spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, max_model_len: int) -> None:
        size = spec.hidden_size
        self.vocab_size = spec.vocab_size
        self.embed_tokens = VocabParallelEmbedding(
            "embed_tokens", "model.embed_tokens", spec.vocab_size, size, dtype=dtype, tp=tp
        )
        # Rounded as the model was trained: the root of 1152 is 34 in bfloat16.
        scale = float(torch.tensor(size**0.5).to(dtype))
        self._embedding_scale = scale if self.family.scaled_embeddings else None
        ropes = [spec.rope] if spec.sliding_rope is None else [spec.rope, spec.sliding_rope]
        self.rotaries = [RotaryEmbedding(spec.head_dim, rope, max_model_len) for rope in ropes]
        # By layer, the index of its rotary embedding: the last one is for layers with a sliding window.
        self.rotary_of_layer = [len(ropes) - 1 if i in spec.sliding_windows else 0 for i in range(spec.num_layers)]
        self.layers = [self.layer_class(i, spec, tp, dtype, self.family) for i in range(spec.num_layers)]
        self.norm = RMSNorm("norm", "model.norm", size, spec.rms_norm_eps, dtype, plus_one=self.family.norm_plus_one)
        tied = self.embed_tokens if spec.tie_word_embeddings else None
        self.lm_head = ParallelLMHead("lm_head", "lm_head", spec.vocab_size, size, dtype=dtype, tp=tp, tied=tied)
        self.attention_layers = [layer.self_attention.attention for layer in self.layers]

    def _weighted(self) -> list[WeightedLayer]:
        """Every layer with weights, the embedding before the LM head that may share its table."""
        inner = [weighted for layer in self.layers for weighted in layer.layers()]
        return [self.embed_tokens, *inner, self.norm, self.lm_head]

    def weights(self) -> list[Weight]:
        return [weight for layer in self._weighted() for weight in layer.weights()]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops from `tensors` layer by layer, so that a weight and its packed copy coexist only briefly."""
        for layer in self._weighted():
            layer.bind(tensors, updatable)
        device = self.embed_tokens.table.device
        for rotary in self.rotaries:
            rotary.bind(device)
        for decoder_layer in self.layers:
            decoder_layer.mlp.bind_activation(device)
        assert not len(tensors), "a declared weight was not bound"

    def refresh(self) -> None:
        for layer in self._weighted():
            layer.refresh()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [n] int64 -> a new tensor [n, hidden_size], the input of the first layer."""
        embedded = self.embed_tokens(input_ids)
        return embedded if self._embedding_scale is None else embedded.mul_(self._embedding_scale)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids and positions: [num_tokens] int64 -> hidden states [num_tokens, hidden_size], normalised."""
        rotations = [rotary(positions) for rotary in self.rotaries]
        # The residual stream is float32 whatever the dtype: each layer adds to it twice, and 16 bits would round it
        # each time. In a simulation of every rounding, SmolLM2's log-probabilities in bfloat16 are 0.0165 off in the
        # mean with a stream of bfloat16, and 0.0082 with this one.
        hidden = Residual(self.embed(input_ids).float())
        for layer, which in zip(self.layers, self.rotary_of_layer, strict=True):
            layer(hidden, rotations[which], ctx)
        return hidden.normed(self.norm)

    def compute_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """hidden: [n, hidden_size] -> logits [n, vocab_size], float32, complete and equal on every rank; in `out`,
        contiguous, where given."""
        return self.lm_head(hidden, out)
