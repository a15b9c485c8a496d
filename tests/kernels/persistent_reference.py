"""Layers of a decoder for one row in plain torch, in float32, and random ones; of FP8 by blocks too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ringcore.kernels.linears.round_rows import round_rows_reference
from ringcore.kernels.persistent.persistent_layers import PersistentLayer
from ringcore.kernels.persistent.persistent_tiles import DecoderShape

EPS, HEAD_EPS, BLOCK = 1e-6, 1e-5, 128


@dataclass
class Row:
    """A step of one row."""

    hidden: torch.Tensor  # [1, hidden_size] float32
    cos_sin: torch.Tensor  # [1, head_size]
    seq_lens: torch.Tensor  # [1] int32
    block_table: torch.Tensor  # [1, blocks] int32
    kv_caches: list[torch.Tensor]  # of layers

    def clone(self) -> Row:
        caches = [cache.clone() for cache in self.kv_caches]
        return Row(self.hidden.clone(), self.cos_sin, self.seq_lens, self.block_table, caches)


def random_layers(
    shape: DecoderShape,
    num_layers: int,
    dtype: torch.dtype,
    device: str,
    gain_dtype: torch.dtype | None = None,
    has_bias: bool = False,
    has_head_norm: bool = True,
    is_dense: bool = False,
) -> list[PersistentLayer]:
    """is_dense: of FP8, see `_coded`."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_size
    qkv = heads + 2 * shape.num_kv_heads * shape.head_size
    experts = (shape.num_experts,) if shape.num_experts else ()

    def normal(*sizes: int, deviation: float = 1.0) -> torch.Tensor:
        return (torch.randn(*sizes, generator=generator, device=device) * deviation).to(dtype)

    def gain(*sizes: int) -> torch.Tensor:
        return (1 + torch.randn(*sizes, generator=generator, device=device) * 0.1).to(gain_dtype or dtype)

    layers = [
        PersistentLayer(
            gain(hidden),
            normal(qkv, hidden, deviation=hidden**-0.5),
            normal(qkv) if has_bias else None,
            gain(2, shape.head_size) if has_head_norm else None,
            normal(hidden, heads, deviation=heads**-0.5),
            gain(hidden),
            normal(*experts, 2 * inner, hidden, deviation=2 * hidden**-0.5),
            normal(*experts, hidden, inner, deviation=inner**-0.5),
            normal(*experts, hidden, deviation=2 * hidden**-0.5) if experts else None,
        )
        for _ in range(num_layers)
    ]
    return layers if shape.weight_bytes == 2 else [_coded(layer, generator, is_dense) for layer in layers]


def _coded(layer: PersistentLayer, generator: torch.Generator | None, is_dense: bool) -> PersistentLayer:
    """Linears in FP8. Of 16 weights of a row one is not 0, or all are not: then sums of float16s are rounded, so that
    some inputs of the next product are rounded to other codes."""
    found = []
    for weight in layer.linears:
        rows = weight.flatten(0, -2).float()
        blocks = len(rows) // BLOCK, rows.shape[1] // BLOCK
        scales = torch.rand(blocks, generator=generator, device=weight.device) * 0.03 + 0.01
        if not is_dense:
            of_16 = rows.unflatten(1, (-1, 16))
            chosen = torch.rand(of_16.shape, generator=generator, device=weight.device).argmax(-1, keepdim=True)
            rows = torch.zeros_like(of_16).scatter_(2, chosen, 4 * of_16.gather(2, chosen)).flatten(1)
        codes = (rows / 0.02).to(torch.float8_e4m3fn).view(torch.uint8).view(weight.shape)
        found.append((codes, scales))
    qkv, out, gate_up, down = (codes for codes, _ in found)
    scales_of = tuple(scales for _, scales in found)
    return replace(layer, qkv=qkv, out=out, gate_up=gate_up, down=down, scales=scales_of)


def random_row(
    shape: DecoderShape, num_layers: int, length: int, dtype: torch.dtype, device: str, block_size: int = 16
) -> Row:
    generator = torch.Generator(device).manual_seed(length)
    num_blocks = length // block_size + 2
    angles = torch.rand(shape.head_size // 2, generator=generator, device=device) * 6
    cache = num_blocks + 1, 2, shape.num_kv_heads, block_size, shape.head_size
    return Row(
        torch.randn(1, shape.hidden_size, generator=generator, device=device),
        torch.stack((angles.cos(), angles.sin()), -1).view(1, -1),
        torch.tensor([length], dtype=torch.int32, device=device),
        (torch.randperm(num_blocks, generator=generator, device=device) + 1).int()[None],
        [torch.randn(cache, generator=generator, device=device).to(dtype) for _ in range(num_layers)],
    )


def run_reference(
    shape: DecoderShape,
    layers: list[PersistentLayer],
    row: Row,
    *,
    is_gelu: bool = False,
    normalises: bool = False,
) -> None:
    """Changes `row` as `PersistentLayers` does."""
    for layer, cache in zip(layers, row.kv_caches, strict=True):
        heads = _product(_normed(row.hidden, layer.input_gain, EPS), layer, 0)
        if layer.bias is not None:
            heads += layer.bias.float()
        row.hidden += _product(_attended(shape, layer, row, cache, heads), layer, 1)
        x = _normed(row.hidden, layer.mlp_gain, EPS)
        if layer.router is None:
            row.hidden += _mlp(x, layer, is_gelu)
            continue
        for expert, weight in zip(*_routed(shape, layer.router, x, normalises), strict=True):
            row.hidden += weight * _mlp(x, layer, is_gelu, expert)


def _product(x: torch.Tensor, layer: PersistentLayer, index: int, expert: int | None = None) -> torch.Tensor:
    """x: [1, inputs]. index: of the linear."""
    weight = layer.linears[index] if expert is None else layer.linears[index][expert]
    if not layer.scales:
        return x @ weight.float().t()
    scales = layer.scales[index].view(-1, weight.shape[0] // BLOCK, weight.shape[1] // BLOCK)[expert or 0]
    codes = weight.view(torch.float8_e4m3fn).float().view(scales.shape[0], BLOCK, scales.shape[1], BLOCK)
    rounded = round_rows_reference(x, BLOCK)
    rows = (rounded.codes.float().view(-1, BLOCK) * rounded.scales.view(-1, 1)).flatten()
    return rows[None] @ (codes * scales[:, None, :, None]).view(weight.shape).t()


def _mlp(x: torch.Tensor, layer: PersistentLayer, is_gelu: bool, expert: int | None = None) -> torch.Tensor:
    gate, up = _product(x, layer, 2, expert).chunk(2, 1)
    functional = torch.nn.functional
    gated = (functional.gelu(gate, approximate="tanh") if is_gelu else functional.silu(gate)) * up
    return _product(gated, layer, 3, expert)


def _routed(
    shape: DecoderShape, router: torch.Tensor, x: torch.Tensor, normalises: bool
) -> tuple[list[int], torch.Tensor]:
    """As `route_reference`; of equal logits the first. The experts, and their weights."""
    logits = (x @ router.float().t())[0].to(router.dtype).float()
    experts = logits.sort(descending=True, stable=True)[1][: shape.num_chosen]
    weights = logits.softmax(-1)[experts]
    if normalises:
        weights = weights / weights.sum()
    return experts.tolist(), weights.to(router.dtype).float()


def _attended(
    shape: DecoderShape, layer: PersistentLayer, row: Row, cache: torch.Tensor, heads: torch.Tensor
) -> torch.Tensor:
    """heads: of q, k and v in a row."""
    length, block_size = int(row.seq_lens), cache.shape[3]
    sizes = shape.num_heads, shape.num_kv_heads, shape.num_kv_heads
    q, k, v = heads.view(-1, shape.head_size).split(sizes)
    if layer.head_gains is not None:
        q, k = _normed(q, layer.head_gains[0], HEAD_EPS), _normed(k, layer.head_gains[1], HEAD_EPS)
    if length == 0:
        return torch.zeros_like(q).view(1, -1)
    q, k = _rotated(q, row.cos_sin), _rotated(k, row.cos_sin)
    tokens = torch.arange(length, device=cache.device)
    blocks, offsets = row.block_table[0, tokens // block_size].long(), tokens % block_size
    cache[blocks[-1], 0, :, offsets[-1]], cache[blocks[-1], 1, :, offsets[-1]] = k.to(cache.dtype), v.to(cache.dtype)
    keys, values = cache[blocks, 0, :, offsets].float(), cache[blocks, 1, :, offsets].float()
    of_groups = q.view(shape.num_kv_heads, -1, shape.head_size)
    weights = (torch.einsum("hgd,lhd->hgl", of_groups, keys) * shape.head_size**-0.5).softmax(-1)
    return torch.einsum("hgl,lhd->hgd", weights, values).reshape(1, -1)


def _normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        * torch.view_as_complex(cos_sin.unflatten(-1, (-1, 2)).contiguous())
    ).flatten(-2)
