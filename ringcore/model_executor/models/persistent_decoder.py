"""A decoder whose steps of one row are one launch for all layers (`persistent_layers`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.attention.layer import Attention
from ringcore.checkpoint.family import Activation
from ringcore.model_executor import ops
from ringcore.model_executor.layers.norm import HeadNorm, RMSNorm
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.models.decoder_layer import DecoderLayer, GatedMLP, LayerInputs, SelfAttention
from ringcore.model_executor.residual import Residual

if TYPE_CHECKING:
    from ringcore.kernels.persistent.persistent_layers import PersistentLayer, PersistentLayers

__all__ = ["PersistentDecoder"]

_ALIGNMENT = 16  # bytes, of rows and weights


class _Parts(NamedTuple):
    """Of a layer that the kernel may compute."""

    attention: Attention
    tensors: PersistentLayer
    head_norm: HeadNorm | None
    kind: tuple[object, ...]  # what all layers have in common


@dataclass(frozen=True, slots=True)
class PersistentDecoder:
    kernel: PersistentLayers
    attention: Sequence[Attention]  # by layer
    rotary: int
    head_norm: HeadNorm | None  # of the first layer
    dtype: torch.dtype

    @classmethod
    def of(cls, layers: Sequence[DecoderLayer]) -> PersistentDecoder | None:
        """layers: bound. None: they differ, or compute something else, or the device has no such kernel."""
        parts = [_parts_of(layer) for layer in layers]
        found = [one for one in parts if one is not None]
        if not found or len(found) < len(parts) or len({one.kind for one in found}) > 1:
            return None
        first, mlp = layers[0].self_attention, layers[0].mlp
        assert isinstance(first, SelfAttention)
        assert isinstance(mlp, GatedMLP)
        kernel = _kernel(layers[0].input_norm.eps, mlp.activation, found)
        if kernel is None:
            return None
        attention = [one.attention for one in found]
        return cls(kernel, attention, first.rotary, first.head_norm, found[0].tensors.qkv.dtype)

    def __call__(self, hidden: Residual, inputs: LayerInputs) -> bool:
        """Whether this step has one row, and `hidden` is now the stream after the last layer; else nothing is done."""
        ctx, first = inputs.ctx, self.attention[0]
        if len(hidden) != 1 or ctx.tokens is not NO_TOKEN_CONTEXT:
            return False
        row = first.one_row(ctx)
        rotation = inputs.rotations[self.rotary].of_heads(self.head_norm)
        if row is None or rotation is None or len({ctx.group_of_layer[one.index] for one in self.attention}) > 1:
            return False
        caches = [ctx.kv_caches[one.index] for one in self.attention]
        if caches[0].dtype != self.dtype:  # FP8
            return False
        self.kernel(hidden.rows, rotation.cos_sin, *row, caches)
        return True


def _parts_of(layer: DecoderLayer) -> _Parts | None:
    attention, mlp, norms = layer.self_attention, layer.mlp, (layer.input_norm, layer.mlp_norm)
    if type(layer) is not DecoderLayer or not isinstance(attention, SelfAttention) or not isinstance(mlp, GatedMLP):
        return None
    if attention.qk_norm is not None or attention.sinks is not None or not attention.attention.is_plain:
        return None
    if attention.o_proj.num_ranks > 1 or len({norm.eps for norm in norms}) > 1:
        return None
    linears = attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj
    found = [one for one in (_dense(linear.product) for linear in linears) if one is not None]
    gains = [norm.gain for norm in norms if isinstance(norm, RMSNorm)]
    if len(found) < len(linears) or len(gains) < len(norms) or any(bias is not None for _, bias in found[1:]):
        return None
    from ringcore.kernels.persistent.persistent_layers import PersistentLayer

    (qkv, bias), (out, _), (gate_up, _), (down, _) = found
    head_norm = attention.head_norm
    head_gains = None if head_norm is None else head_norm.gain
    tensors = PersistentLayer(gains[0], qkv, bias, head_gains, out, gains[1], gate_up, down)
    epsilons = norms[0].eps, None if head_norm is None else head_norm.eps
    forms = [None if one is None else (one.shape, one.dtype) for one in tensors.tensors]
    kind = replace(attention.attention, index=0), mlp.activation, attention.rotary, epsilons, *forms
    return _Parts(attention.attention, tensors, head_norm, kind)


def _dense(product: Product) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    return product.dense if isinstance(product, KernelProduct) else None


def _kernel(eps: float, activation: Activation, layers: Sequence[_Parts]) -> PersistentLayers | None:
    """None: not on this device, or not for these sizes or dtypes."""
    attention, tensors, head_norm, _ = layers[0]
    device = tensors.qkv.device
    if not ops.has_kernels(device):
        return None
    from ringcore.kernels.persistent.persistent_layers import MAX_LAYERS, PersistentLayers, runs_on
    from ringcore.kernels.persistent.persistent_tiles import DecoderShape, choose_persistent_tiles

    sizes = tensors.qkv.shape[1], tensors.down.shape[1]
    heads = attention.num_heads, attention.num_kv_heads, attention.head_size
    tiles = choose_persistent_tiles(shape := DecoderShape(*sizes, *heads))
    of_all = [tensor for one in layers for tensor in one.tensors.tensors if tensor is not None]
    is_16_bit = tensors.qkv.dtype != torch.float32 and len({one.dtype for one in tensors.weights}) == 1
    are_aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in of_all)
    if tiles is None or not is_16_bit or not are_aligned or len(layers) > MAX_LAYERS or not runs_on(device):
        return None
    return PersistentLayers(
        shape,
        tiles,
        [one.tensors for one in layers],
        eps=eps,
        head_eps=0.0 if head_norm is None else head_norm.eps,
        scale=attention.scale,
        is_gelu=activation != "silu",
    )
