"""The page layout of the torch_sdpa backend: shape, writes and reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from ringcore.kv_cache.spec import HeadsSpec, KVCacheSpec, MLASpec

__all__ = ["Context", "Gather", "PageLayout", "Parts"]

Parts = tuple[torch.Tensor, ...]  # `PageLayout.parts`


class PageLayout:
    """[2, num_sections, num_blocks, heads_per_section, block_size, head_size]: keys then values, head-major. In FP8 the
    numbers of a head are the head_size + 1 bytes of `fp8_rows`, which are rounded and expanded here.

    If values have another size than keys it is flat: all keys in that order, then all values. `parts` has either case
    as tensors of these six dimensions: one of two kinds, or the keys and the values, of one kind each.

    Layers of other shapes may share the same memory. Then a section is the largest group of heads that divides the
    heads of each of them, and block b has the same bytes of every section in all shapes: two layers of 4 and of 2
    heads, with blocks of 16 and 32 tokens, have 2 sections, with 2 heads per section in the one and 1 in the other.
    Layers of one shape, the common case, have one head per section.
    """

    def __init__(self, spec: HeadsSpec, sharing_specs: Sequence[KVCacheSpec]) -> None:
        assert all(other.dtype == spec.dtype and self.can_share(spec, other) for other in sharing_specs)
        self._spec = spec
        self._num_sections = math.gcd(spec.num_kv_heads, *(other.num_kv_heads for other in sharing_specs))
        self.heads_per_section = spec.num_kv_heads // self._num_sections
        self._sizes = tuple(size + spec.is_fp8 for size in (spec.head_size, spec.value_size))  # as they are stored
        # Whether consecutive blocks of a head are contiguous, so that they can be read in place.
        self.has_contiguous_blocks = self.heads_per_section == 1

    @staticmethod
    def can_share(spec: HeadsSpec, other: KVCacheSpec) -> bool:
        """Whether a block of layers of both has equally many bytes of keys, and of values."""
        if isinstance(other, MLASpec):
            return False
        keys, others = (one.num_kv_heads * one.block_size * one.key_bytes for one in (spec, other))
        return (keys, spec.page_size_bytes) == (others, other.page_size_bytes)

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        spec = self._spec
        if spec.v_head_size is not None:
            return (num_blocks * spec.num_kv_heads * spec.block_size * sum(self._sizes),)
        return (2, self._num_sections, num_blocks, self.heads_per_section, spec.block_size, self._sizes[0])

    def parts(self, kv_cache: torch.Tensor) -> Parts:
        """See the class."""
        spec = self._spec
        if spec.v_head_size is None:
            return (kv_cache,)
        tokens = spec.num_kv_heads * spec.block_size  # of a block, over all heads
        num_blocks = len(kv_cache) // (tokens * sum(self._sizes))
        kinds = torch.split_with_sizes(kv_cache, [num_blocks * tokens * n for n in self._sizes])
        shape = (1, self._num_sections, num_blocks, self.heads_per_section, spec.block_size, -1)
        return tuple(kind.view(shape) for kind in kinds)

    def keys_and_values(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The keys and the values: [num_sections, num_blocks, heads_per_section, block_size, numbers] each."""
        return _keys_and_values(self.parts(kv_cache))

    def write(self, parts: Parts, slots: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
        """new: keys and values, [num_tokens, num_kv_heads, head_size] each, for slots [num_tokens] int64."""
        if self.has_contiguous_blocks:
            pools = [part.flatten(2, 4) for part in parts]
            for pool, tokens in zip(_keys_and_values(pools), new, strict=True):
                pool.index_copy_(1, slots, tokens.transpose(0, 1))
            return
        blocks, offsets = slots // self._spec.block_size, slots % self._spec.block_size
        for kind, tokens in zip(_keys_and_values(parts), new, strict=True):
            by_section = tokens.reshape(-1, self._num_sections, self.heads_per_section, tokens.shape[2])
            kind[:, blocks, :, offsets] = by_section


class Gather:
    """Blocks of one or several sequences, copied from the KV cache by one row lookup."""

    __slots__ = ("_block_ids", "_rows", "_rows_of")

    def __init__(self, block_ids: np.ndarray) -> None:
        self._block_ids = torch.from_numpy(block_ids.astype(np.int64).reshape(-1))  # [batch * blocks]
        self._rows_of = (0, 0)  # kinds and number of blocks
        self._rows = self._block_ids

    def rows(self, part: torch.Tensor) -> torch.Tensor:
        """[kinds * num_kv_heads * batch * blocks] row indices into the part viewed as [kinds * num_kv_heads *
        num_blocks, ...].

        Only the caches know the number of blocks, so the first layer of a step computes this for all layers.
        """
        kinds, num_sections, num_blocks, heads_per_section = part.shape[:4]
        if self._rows_of != (kinds, num_blocks):
            section = num_blocks * heads_per_section
            firsts = torch.arange(0, kinds * num_sections * section, section)
            if heads_per_section == 1:
                self._rows = (firsts[:, None] + self._block_ids).view(-1)
            else:
                heads = firsts[:, None] + torch.arange(heads_per_section)
                self._rows = (heads.view(-1, 1) + self._block_ids * heads_per_section).view(-1)
            self._rows_of = kinds, num_blocks
        return self._rows

    def read(self, parts: Parts, batch: int, first: int, end: int) -> tuple[torch.Tensor, ...]:
        """Of each sequence the slots first to end -> keys, values: [num_kv_heads, batch, end - first, head_size]"""
        return _keys_and_values([self._read(part, batch)[:, :, :, first:end] for part in parts])

    def _read(self, part: torch.Tensor, batch: int) -> torch.Tensor:
        """-> [kinds, num_kv_heads, batch, blocks * block_size, head_size]"""
        kinds, num_sections, _, heads_per_section, block_size, size = part.shape
        gathered = functional.embedding(self.rows(part), part.view(-1, block_size * size))
        return gathered.view(kinds, num_sections * heads_per_section, batch, -1, size)


@dataclass(frozen=True, slots=True)
class Context:
    """The visible keys and values of a sequence: a contiguous range of the cache, or blocks to gather."""

    num_tokens: int  # up to the sequence's end
    num_skipped: int  # tokens of the first block that are before the window
    first_slot: int  # of the contiguous range; unused with a gather
    gather: Gather | None

    def read(self, parts: Parts) -> tuple[torch.Tensor, ...]:
        """-> keys, values: [num_kv_heads, 1, num_tokens, head_size]"""
        if self.gather is not None:
            return self.gather.read(parts, 1, self.num_skipped, self.num_skipped + self.num_tokens)
        first, end = self.first_slot, self.first_slot + self.num_tokens
        return _keys_and_values([part.flatten(2, 4).unsqueeze(2).narrow(3, first, end - first) for part in parts])


def _keys_and_values(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Of one part with two kinds, or two parts with one."""
    return parts[0].unbind(0) if len(parts) == 1 else (parts[0][0], parts[1][0])
