"""A decoder whose steps of one row (`persistent_layers`), or of a few (`persistent_rows`), are one launch for all
layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.attention.layer import Attention
from ringcore.checkpoint.family import Activation
from ringcore.kernels.linears.packed_weight import Fp8Blocks
from ringcore.kernels.mixtures.expert_matrices import RouterForm
from ringcore.model_executor import ops
from ringcore.model_executor.layers.norm import HeadNorm, RMSNorm
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.rounded_product import RoundedProduct
from ringcore.model_executor.models.decoder_layer import (
    DecoderLayer,
    GatedMLP,
    LayerInputs,
    SelfAttention,
    Sublayer,
)
from ringcore.model_executor.models.mixture import Experts, Mixture
from ringcore.model_executor.residual import Residual

if TYPE_CHECKING:
    from ringcore.kernels.persistent.persistent_layers import PersistentLayer, PersistentLayers
    from ringcore.kernels.persistent.persistent_rows import PersistentRows

__all__ = ["PersistentDecoder"]

_ALIGNMENT = 16  # bytes, of rows and weights


class _Linear(NamedTuple):
    """scales: of codes of FP8. dtype: of its inputs."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, product: Product) -> _Linear | None:
        product = product.unsearched
        if isinstance(product, KernelProduct) and product.dense is not None:
            return cls(*product.dense, None, product.dense[0].dtype)
        if isinstance(product, RoundedProduct) and product.fp8_blocks is not None:
            return cls.in_blocks(*product.fp8_blocks)
        return None

    @classmethod
    def in_blocks(cls, weight: Fp8Blocks, bias: torch.Tensor | None = None) -> _Linear:
        return cls(weight.codes, bias, weight.scales, weight.dtype)


class _Mlp(NamedTuple):
    """Or a mixture in its place."""

    gate_up: _Linear
    down: _Linear
    activation: Activation
    router: torch.Tensor | None = None
    form: RouterForm | None = None


class _Parts(NamedTuple):
    """Of a layer that the kernel may compute."""

    attention: Attention
    tensors: PersistentLayer
    dtype: torch.dtype
    head_norm: HeadNorm | None
    mlp: _Mlp
    kind: tuple[object, ...]  # what all layers have in common


@dataclass(frozen=True, slots=True)
class PersistentDecoder:
    of_one_row: PersistentLayers | None
    of_rows: PersistentRows | None  # of a few
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
        kernels = _kernels(layers[0].input_norm.eps, found)
        if kernels == (None, None):
            return None
        attention = [one.attention for one in found]
        return cls(*kernels, attention, first.rotary, first.head_norm, found[0].dtype)

    def __call__(self, hidden: Residual, inputs: LayerInputs) -> bool:
        """Whether a kernel computes this step, and `hidden` is now the stream after the last layer; else nothing is
        done."""
        ctx, first, num_rows = inputs.ctx, self.attention[0], len(hidden)
        kernel = self._kernel(num_rows)
        if kernel is None or ctx.tokens is not NO_TOKEN_CONTEXT:
            return False
        rows = first.single_tokens(ctx)
        if rows is None or len(rows.seq_lens) != num_rows:
            return False
        rotation = inputs.rotations[self.rotary].of_heads(self.head_norm)
        if rotation is None or len({ctx.group_of_layer[one.index] for one in self.attention}) > 1:
            return False
        caches = [ctx.kv_caches[one.index] for one in self.attention]
        if caches[0].dtype != self.dtype:  # FP8
            return False
        kernel(hidden.rows, rotation.cos_sin, *rows, caches)
        return True

    def _kernel(self, num_rows: int) -> PersistentLayers | PersistentRows | None:
        if num_rows == 1:
            return self.of_one_row
        return self.of_rows if self.of_rows is not None and num_rows <= self.of_rows.MAX_ROWS else None


def _parts_of(layer: DecoderLayer) -> _Parts | None:
    attention, mlp, norms = layer.self_attention, _mlp_of(layer.mlp), (layer.input_norm, layer.mlp_norm)
    if type(layer) is not DecoderLayer or not isinstance(attention, SelfAttention) or mlp is None:
        return None
    if attention.qk_norm is not None or attention.sinks is not None or not attention.attention.is_plain:
        return None
    if attention.o_proj.num_ranks > 1 or len({norm.eps for norm in norms}) > 1:
        return None
    qkv, out = _Linear.of(attention.qkv_proj.product), _Linear.of(attention.o_proj.product)
    gains = [norm.gain for norm in norms if isinstance(norm, RMSNorm)]
    if qkv is None or out is None or len(gains) < len(norms) or out.bias is not None:
        return None
    tensors = _tensors(gains, qkv, attention.head_norm, out, mlp)
    if tensors is None:
        return None
    head_norm = attention.head_norm
    epsilons = norms[0].eps, None if head_norm is None else head_norm.eps
    forms = [None if one is None else (one.shape, one.dtype) for one in tensors.tensors]
    kind = replace(attention.attention, index=0), mlp.activation, mlp.form, attention.rotary, epsilons, *forms
    return _Parts(attention.attention, tensors, qkv.dtype, head_norm, mlp, kind)


def _tensors(
    gains: Sequence[torch.Tensor], qkv: _Linear, head_norm: HeadNorm | None, out: _Linear, mlp: _Mlp
) -> PersistentLayer | None:
    """None: some linears are in FP8 and others are not, or dtypes differ."""
    linears = qkv, out, mlp.gate_up, mlp.down
    scales = tuple(one.scales for one in linears if one.scales is not None)
    dtypes = {one.dtype for one in (*linears, mlp.router, qkv.bias) if one is not None}
    if len(scales) not in (0, len(linears)) or len(dtypes) > 1 or qkv.dtype == torch.float32:
        return None
    from ringcore.kernels.persistent.persistent_layers import PersistentLayer

    head_gains, weights = None if head_norm is None else head_norm.gain, (mlp.gate_up.weight, mlp.down.weight)
    attention = qkv.weight, qkv.bias, head_gains, out.weight
    return PersistentLayer(gains[0], *attention, gains[1], *weights, mlp.router, scales)


def _mlp_of(mlp: Sublayer) -> _Mlp | None:
    if isinstance(mlp, GatedMLP):
        gate_up, down = _Linear.of(mlp.gate_up_proj.product), _Linear.of(mlp.down_proj.product)
        if gate_up is None or down is None or gate_up.bias is not None or down.bias is not None:
            return None
        return _Mlp(gate_up, down, mlp.activation)
    if not isinstance(mlp, Mixture) or mlp.router.plain is None:
        return None
    (weight, form), experts = mlp.router.plain, _experts(mlp.experts)
    if experts is None or form != RouterForm(form.k, form.normalises):
        return None
    return _Mlp(*experts, "silu", weight, form)


def _experts(experts: Experts) -> tuple[_Linear, _Linear] | None:
    """Gate and up, and down."""
    if experts.dense is not None:
        up, down = (_Linear(weight, None, None, weight.dtype) for weight in experts.dense)
        return up, down
    if experts.fp8_blocks is not None:
        up, down = map(_Linear.in_blocks, experts.fp8_blocks)
        return up, down
    return None


def _kernels(eps: float, layers: Sequence[_Parts]) -> tuple[PersistentLayers | None, PersistentRows | None]:
    """None: not on this device, or not for these sizes or dtypes."""
    attention, tensors, dtype, head_norm, mlp, _ = layers[0]
    device = tensors.qkv.device
    if not ops.has_kernels(device):
        return None, None
    from ringcore.kernels.persistent.persistent_layers import MAX_LAYERS, PersistentLayers, runs_on
    from ringcore.kernels.persistent.persistent_rows import PersistentRows
    from ringcore.kernels.persistent.persistent_rows_tiles import choose_rows_tiles
    from ringcore.kernels.persistent.persistent_tiles import DecoderShape, choose_persistent_tiles

    sizes = tensors.qkv.shape[1], tensors.down.shape[-1]
    heads = attention.num_heads, attention.num_kv_heads, attention.head_size
    experts = (0, 0) if mlp.form is None else (len(tensors.down), mlp.form.k)
    shape = DecoderShape(*sizes, *heads, *experts, weight_bytes=tensors.qkv.itemsize)
    of_all = [tensor for one in layers for tensor in one.tensors.tensors if tensor is not None]
    are_aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in of_all)
    if not are_aligned or len(layers) > MAX_LAYERS or not runs_on(device):
        return None, None
    tiles, rows_tiles = choose_persistent_tiles(shape), choose_rows_tiles(shape)
    of_layers = [one.tensors for one in layers]
    head_eps, is_gelu = 0.0 if head_norm is None else head_norm.eps, mlp.activation != "silu"
    numbers: dict[str, Any] = {"eps": eps, "head_eps": head_eps, "scale": attention.scale, "is_gelu": is_gelu}
    normalises = mlp.form is not None and mlp.form.normalises
    return (
        None if tiles is None else PersistentLayers(shape, tiles, of_layers, dtype, **numbers, normalises=normalises),
        None if rows_tiles is None else PersistentRows(shape, rows_tiles, of_layers, dtype, **numbers),
    )
