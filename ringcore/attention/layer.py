"""One attention layer of a model: its KV cache spec and the call into the backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ringcore.attention.backend import AttentionBackend, LatentBackend, LatentUpProjection, SingleTokens
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.attention.spec import AttentionSpec
from ringcore.errors import ConfigError
from ringcore.kernels.attention.head_rotation import HeadRotation
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kv_cache.spec import ChunkedAttentionSpec, FullAttentionSpec, KVCacheSpec, MLASpec, SlidingWindowSpec

__all__ = ["AnyAttention", "Attention", "KVWriteTarget", "LatentAttention"]


class KVWriteTarget(NamedTuple):
    """Where what a step's tokens store is written: one layer's cache, of its backend's shape, and the slot mapping."""

    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor  # [num_tokens] int64: block_id * block_size + offset in the block


@dataclass(frozen=True, slots=True)
class Attention:
    """Causal attention of layer `index` on this rank's heads; with `shares_kv`, of another layer that is given the
    same keys and values: it reads the cache of layer `index` after that one in the same step, and writes nothing.

    With a `sliding_window` a token sees the last sliding_window tokens, itself included; with a `chunk_size` those of
    its chunk, the positions that are the same when divided by chunk_size and rounded down.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    chunk_size: int | None = None
    v_head_size: int | None = None  # of values; None: head_size
    softcap: float | None = None  # this and the next: see `AttentionSpec`
    has_sinks: bool = False
    shares_kv: bool = False
    spec: AttentionSpec = field(init=False)  # what a backend is told in every call

    def __post_init__(self) -> None:
        assert self.sliding_window is None or self.chunk_size is None, "a window within chunks"
        spec = AttentionSpec(self.num_heads, self.scale, self.softcap, self.has_sinks, shares_kv=self.shares_kv)
        object.__setattr__(self, "spec", spec)
        if self.v_head_size == self.head_size:
            object.__setattr__(self, "v_head_size", None)

    @property
    def name(self) -> str:
        return f"layers.{self.index}.attention"

    def kv_cache_spec(self, block_size: int, dtype: str, is_fp8: bool = False) -> KVCacheSpec:
        """What the layer caches, in blocks of `block_size` tokens.

        The KV cache plan may store it otherwise: in longer blocks, or as full attention if the mask is only causal.
        """
        shape = (block_size, self.num_kv_heads, self.head_size, dtype)
        if self.sliding_window is not None:
            return SlidingWindowSpec(*shape, self.sliding_window, self.v_head_size, is_fp8)
        if self.chunk_size is not None:
            return ChunkedAttentionSpec(*shape, self.chunk_size, self.v_head_size, is_fp8)
        return FullAttentionSpec(*shape, self.v_head_size, is_fp8)

    def kv_write_target(self, ctx: ForwardContext) -> KVWriteTarget | None:
        """Where to write keys and values before `__call__`, which then gets none; None: the backend writes them
        itself."""
        group = ctx.groups[ctx.group_of_layer[self.index]]
        if not group.backend.accepts_prewritten_kv or self.v_head_size is not None:
            return None
        return KVWriteTarget(ctx.kv_caches[self.index], group.metadata.slot_mapping)

    def zero_kv(self, group: GroupContext, kv_cache: torch.Tensor) -> None:
        """Zeroes the keys and values of the step's tokens in this layer, by the write path that every backend has."""
        num_tokens, v_head_size = group.metadata.num_tokens, self.v_head_size or self.head_size
        dtype = TORCH_DTYPES[group.backend.spec.dtype]
        query = kv_cache.new_zeros(num_tokens, self.num_heads, self.head_size, dtype=dtype)
        key = query.new_zeros(num_tokens, self.num_kv_heads, self.head_size)
        value = query.new_zeros(num_tokens, self.num_kv_heads, v_head_size)
        sinks = query.new_zeros(self.num_heads) if self.has_sinks else None
        _of_heads(group).forward(query, key, value, kv_cache, group.metadata, group.plan, self.spec, sinks)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        ctx: ForwardContext,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q: [num_tokens, num_heads, head_size], k: [num_tokens, num_kv_heads, head_size] and v: [num_tokens,
        num_kv_heads, v_head_size] -> [num_tokens, num_heads, v_head_size].

        k and v are None if they were written to `kv_write_target`. sinks: [num_heads], a weight of the model, if the
        layer has them.
        """
        assert (sinks is not None) == self.has_sinks
        group = ctx.groups[ctx.group_of_layer[self.index]]
        kv_cache = ctx.kv_caches[self.index]
        return _of_heads(group).forward(q, k, v, kv_cache, group.metadata, group.plan, self.spec, sinks)

    def rotates(self, ctx: ForwardContext) -> bool:
        """Whether `of_projection` serves this step."""
        group = ctx.groups[ctx.group_of_layer[self.index]]
        return self.v_head_size is None and not self.shares_kv and _of_heads(group).rotates(group.plan)

    @property
    def is_plain(self) -> bool:
        """Whether a token sees all before it, by the softmax of scaled scores, and keys and values are of one width."""
        sees_all = self.sliding_window is None and self.chunk_size is None
        return sees_all and self.spec.is_plain and self.v_head_size is None and not self.shares_kv

    def single_tokens(self, ctx: ForwardContext) -> SingleTokens | None:
        """See `AttentionBackend.single_tokens`."""
        group = ctx.groups[ctx.group_of_layer[self.index]]
        return _of_heads(group).single_tokens(group.plan)

    def of_projection(
        self, qkv: torch.Tensor, rotation: HeadRotation, ctx: ForwardContext, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`__call__` of the output of a QKV projection before QK norm and rotary embedding: [num_tokens, (num_heads +
        2 * num_kv_heads) * head_size]."""
        assert (sinks is not None) == self.has_sinks
        group, kv_cache = ctx.groups[ctx.group_of_layer[self.index]], ctx.kv_caches[self.index]
        return _of_heads(group).forward_unrotated(qkv, rotation, kv_cache, group.plan, self.spec, sinks)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Causal attention of layer `index` on this rank's heads, whose keys and values follow from latents (`MLASpec`)."""

    index: int
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    scale: float
    spec: AttentionSpec = field(init=False)  # what a backend is told in every call

    def __post_init__(self) -> None:
        sizes = self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim
        object.__setattr__(self, "spec", AttentionSpec(self.num_heads, self.scale, expanded_sizes=sizes))

    @property
    def name(self) -> str:
        return f"layers.{self.index}.attention"

    def kv_cache_spec(self, block_size: int, dtype: str, is_fp8: bool = False) -> KVCacheSpec:
        """See `Attention`. Raises `ConfigError` for FP8."""
        if is_fp8:
            raise ConfigError(
                f"kv_cache_dtype='fp8': {self.name} caches latents, one row for all {self.num_heads} heads, for which "
                "there is no FP8; give kv_cache_dtype='auto'",
                option="kv_cache_dtype",
                value="fp8",
            )
        return MLASpec(block_size, self.kv_lora_rank, self.qk_rope_head_dim, dtype)

    def kv_write_target(self, ctx: ForwardContext) -> KVWriteTarget | None:
        """Where to write rows before `__call__`; None: this writes them."""
        group = ctx.groups[ctx.group_of_layer[self.index]]
        if not group.backend.accepts_prewritten_kv:
            return None
        return KVWriteTarget(ctx.kv_caches[self.index], group.metadata.slot_mapping)

    def zero_kv(self, group: GroupContext, kv_cache: torch.Tensor) -> None:
        """Zeroes the rows of the step's tokens in this layer."""
        rows = kv_cache.new_zeros(group.metadata.num_tokens, kv_cache.shape[-1])
        _of_latents(group).write(rows, kv_cache, group.metadata.slot_mapping)

    def __call__(
        self, query: torch.Tensor, rows: torch.Tensor, up: LatentUpProjection, ctx: ForwardContext
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim], rows: [num_tokens, kv_lora_rank +
        qk_rope_head_dim], written to `kv_write_target` where there is one -> [num_tokens, num_heads, v_head_dim]."""
        group, kv_cache = ctx.groups[ctx.group_of_layer[self.index]], ctx.kv_caches[self.index]
        backend = _of_latents(group)
        if not backend.accepts_prewritten_kv:
            backend.write(rows, kv_cache, group.metadata.slot_mapping)
        return backend.forward(query, rows, up, kv_cache, group.metadata, group.plan, self.spec)


AnyAttention = Attention | LatentAttention


def _of_heads(group: GroupContext) -> AttentionBackend:
    assert isinstance(group.backend, AttentionBackend)
    return group.backend


def _of_latents(group: GroupContext) -> LatentBackend:
    assert isinstance(group.backend, LatentBackend)
    return group.backend
