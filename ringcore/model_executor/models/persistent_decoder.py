"""A decoder whose steps of one row are one launch for all layers (`persistent_layers`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.attention.layer import Attention
from ringcore.checkpoint.family import Activation
from ringcore.kernels.mixtures.expert_matrices import RouterForm
from ringcore.model_executor import ops
from ringcore.model_executor.layers.norm import HeadNorm, RMSNorm
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.models.decoder_layer import (
    DecoderLayer,
    GatedMLP,
    LayerInputs,
    SelfAttention,
    Sublayer,
)
from ringcore.model_executor.models.mixture import Mixture
from ringcore.model_executor.residual import Residual

if TYPE_CHECKING:
    from ringcore.kernels.persistent.persistent_layers import PersistentLayer, PersistentLayers

__all__ = ["PersistentDecoder"]

_ALIGNMENT = 16  # bytes, of rows and weights


class _Mlp(NamedTuple):
    """Or a mixture in its place."""

    gate_up: torch.Tensor
    down: torch.Tensor
    activation: Activation
    router: torch.Tensor | None = None
    form: RouterForm | None = None


class _Parts(NamedTuple):
    """Of a layer that the kernel may compute."""

    attention: Attention
    tensors: PersistentLayer
    head_norm: HeadNorm | None
    mlp: _Mlp
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
        first = layers[0].self_attention
        assert isinstance(first, SelfAttention)
        kernel = _kernel(layers[0].input_norm.eps, found)
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
    attention, mlp, norms = layer.self_attention, _mlp_of(layer.mlp), (layer.input_norm, layer.mlp_norm)
    if type(layer) is not DecoderLayer or not isinstance(attention, SelfAttention) or mlp is None:
        return None
    if attention.qk_norm is not None or attention.sinks is not None or not attention.attention.is_plain:
        return None
    if attention.o_proj.num_ranks > 1 or len({norm.eps for norm in norms}) > 1:
        return None
    qkv, out = _dense(attention.qkv_proj.product), _dense(attention.o_proj.product)
    gains = [norm.gain for norm in norms if isinstance(norm, RMSNorm)]
    if qkv is None or out is None or len(gains) < len(norms) or out[1] is not None:
        return None
    from ringcore.kernels.persistent.persistent_layers import PersistentLayer

    head_norm = attention.head_norm
    head_gains = None if head_norm is None else head_norm.gain
    tensors = PersistentLayer(gains[0], *qkv, head_gains, out[0], gains[1], mlp.gate_up, mlp.down, mlp.router)
    epsilons = norms[0].eps, None if head_norm is None else head_norm.eps
    forms = [None if one is None else (one.shape, one.dtype) for one in tensors.tensors]
    kind = replace(attention.attention, index=0), mlp.activation, mlp.form, attention.rotary, epsilons, *forms
    return _Parts(attention.attention, tensors, head_norm, mlp, kind)


def _mlp_of(mlp: Sublayer) -> _Mlp | None:
    if isinstance(mlp, GatedMLP):
        gate_up, down = _dense(mlp.gate_up_proj.product), _dense(mlp.down_proj.product)
        if gate_up is None or down is None or gate_up[1] is not None or down[1] is not None:
            return None
        return _Mlp(gate_up[0], down[0], mlp.activation)
    if not isinstance(mlp, Mixture) or mlp.router.plain is None or mlp.experts.dense is None:
        return None
    weight, form = mlp.router.plain
    return _Mlp(*mlp.experts.dense, "silu", weight, form) if form == RouterForm(form.k, form.normalises) else None


def _dense(product: Product) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    return product.dense if isinstance(product, KernelProduct) else None


def _kernel(eps: float, layers: Sequence[_Parts]) -> PersistentLayers | None:
    """None: not on this device, or not for these sizes or dtypes."""
    attention, tensors, head_norm, mlp, _ = layers[0]
    device = tensors.qkv.device
    if not ops.has_kernels(device):
        return None
    from ringcore.kernels.persistent.persistent_layers import MAX_LAYERS, PersistentLayers, runs_on
    from ringcore.kernels.persistent.persistent_tiles import DecoderShape, choose_persistent_tiles

    sizes = tensors.qkv.shape[1], tensors.down.shape[-1]
    heads = attention.num_heads, attention.num_kv_heads, attention.head_size
    experts = () if mlp.form is None else (len(tensors.down), mlp.form.k)
    tiles = choose_persistent_tiles(shape := DecoderShape(*sizes, *heads, *experts))
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
        is_gelu=mlp.activation != "silu",
        normalises=mlp.form is not None and mlp.form.normalises,
    )
