"""What a work item of `warp_split_decode` is given: its queries, and the token of the sequence that the step writes.

They come from q and the KV cache; or from the output of the QKV projection, before QK norm and rotary embedding (RoPE):
then this does for a work item what `qk_norm_rope` does for a step.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ringcore.kernels.attention.warp_split_combine import add
from ringcore.kernels.attention.warp_split_products import power_of_2
from ringcore.kernels.attention.warp_split_tiles import load_query

__all__ = ["load_item", "rotated"]


@gluon.jit
def rotated(x, gain, angles, eps):
    """x: [rows, head_size]. gain: [1, head_size] or None. angles: [rows or 1, head_size] float32, cosine and sine of
    each pair interleaved. -> as `qk_norm_rope`, float32."""
    rows: gl.constexpr = x.shape[0]
    head_size: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    y = x.to(gl.float32)
    if gain is not None:
        y = y * gl.expand_dims(gl.rsqrt(gl.reduce(y * y, 1, add) / head_size + eps), 1) * gain.to(gl.float32)
    first, second = gl.split(gl.reshape(y, [rows, head_size // 2, 2]))
    cos, sin = gl.split(gl.reshape(angles, [angles.shape[0], head_size // 2, 2]))
    cos = gl.convert_layout(cos, first.type.layout, assert_trivial=True)
    sin = gl.convert_layout(sin, first.type.layout, assert_trivial=True)
    y = gl.reshape(gl.join(first * cos - second * sin, second * cos + first * sin), [rows, head_size])
    return gl.convert_layout(y, layout, assert_trivial=True)


@gluon.jit
def _clamped(y, clamp: gl.constexpr):
    """As `qk_norm_rope` stores keys and values of a dtype that they may overflow; clamp: 0: they do not."""
    if clamp > 0:
        y = gl.where(y == y, gl.minimum(gl.maximum(y, -clamp), clamp), 0.0)
    return y


@gluon.jit
def _number(codes, exponent):
    """codes: uint8, exponent: a byte -> float32, see `fp8_rows`."""
    return codes.to(gl.float8e4nv, bitcast=True).to(gl.float32) * power_of_2(exponent.to(gl.int32))


@gluon.jit
def load_item(
    query, kv_cache, cos_sin, norm_weight, eps, sequence, kv_head, own_key, own_slot, has_own, query_stride, exchange,
    num_kv_heads: gl.constexpr, group: gl.constexpr, rows: gl.constexpr, head_size: gl.constexpr,
    value_offset: gl.constexpr, exponent_offset: gl.constexpr, block_size: gl.constexpr, clamp: gl.constexpr,
    layout: gl.constexpr, factor_layout: gl.constexpr,
):  # fmt: skip
    """-> the work item's queries [rows, head_size], zeros beyond the group, and the same as a factor [1, head_size,
    rows]; the key and the value, [1, head_size], of its sequence's last token, 0 without has_own.

    query: of each sequence a row, query_stride apart, of q, or, with cos_sin, [n, head_size] float32, of q, k and v
    before norm_weight, [2, head_size] or None, and the rotation. own_key: the key's offset in the cache. own_slot: its
    place in its block. exchange: shared memory [1, rows, head_size] float32, free. clamp: of keys and values, 0: none.
    """
    dtype: gl.constexpr = query.dtype.element_ty
    row = gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(1, layout)), 1)
    dim = gl.expand_dims(gl.arange(0, head_size, gl.SliceLayout(0, layout)), 0)
    in_bounds = (row < group) & (dim >= 0)
    token = query + sequence.to(gl.int64) * query_stride
    source = token + kv_head * (group * head_size)
    queries = gl.load(source + row * head_size + dim, mask=in_bounds, other=0.0)
    has_own = has_own & (dim >= 0)
    if cos_sin is None:
        factor = load_query(source, group, rows, head_size, factor_layout)
        key = gl.load(kv_cache + own_key + dim, mask=has_own, other=0.0)
        value = gl.load(kv_cache + own_key + value_offset + dim, mask=has_own, other=0.0)
        if exponent_offset > 0:
            byte = own_key + exponent_offset - (kv_head * (2 * block_size) + own_slot) * (head_size - 1)
            key = _number(key, gl.load(kv_cache + byte))
            value = _number(value, gl.load(kv_cache + byte + block_size))
    else:
        keys = token + (num_kv_heads * group + kv_head) * head_size
        key = gl.load(keys + dim, mask=has_own, other=0.0)
        value = gl.load(keys + num_kv_heads * head_size + dim, mask=has_own, other=0.0)
        angles = gl.load(cos_sin + sequence.to(gl.int64) * head_size + dim)
        q_gain = None
        k_gain = None
        if norm_weight is not None:
            q_gain = gl.load(norm_weight + dim)
            k_gain = gl.load(norm_weight + head_size + dim)
        queries = rotated(queries, q_gain, angles, eps).to(dtype)
        key = _clamped(rotated(key, k_gain, angles, eps), clamp).to(dtype)
        value = _clamped(value.to(gl.float32), clamp).to(dtype)
        exchange.store(gl.reshape(queries.to(gl.float32), [1, rows, head_size]))
        factor = exchange.permute((0, 2, 1)).load(factor_layout).to(dtype)
    return queries, factor, key, value
