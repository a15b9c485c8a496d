"""The page layout of the torch_sdpa backend: shape, writes and reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from ringcore.kv_cache.spec import KVCacheSpec

__all__ = ["Context", "Gather", "PageLayout"]


class PageLayout:
    """[2, num_sections, num_blocks, heads_per_section, block_size, head_size]: keys then values, head-major.

    Layers of other shapes may share the same memory. Then a section is the largest group of heads that divides the
    heads of each of them, and block b has the same bytes of every section in all shapes: two layers of 4 and of 2
    heads, with blocks of 16 and 32 tokens, have 2 sections, with 2 heads per section in the one and 1 in the other.
    Layers of one shape, the common case, have one head per section.
    """

    def __init__(self, spec: KVCacheSpec, sharing_specs: Sequence[KVCacheSpec]) -> None:
        assert all(
            (other.page_size_bytes, other.dtype) == (spec.page_size_bytes, spec.dtype) for other in sharing_specs
        ), "layers that share memory must have one page size and dtype"
        self._spec = spec
        self._num_sections = math.gcd(spec.num_kv_heads, *(other.num_kv_heads for other in sharing_specs))
        self._heads_per_section = spec.num_kv_heads // self._num_sections
        # Whether consecutive blocks of a head are contiguous, so that they can be read in place.
        self.has_contiguous_blocks = self._heads_per_section == 1

    def shape(self, num_blocks: int) -> tuple[int, ...]:
        spec = self._spec
        return (2, self._num_sections, num_blocks, self._heads_per_section, spec.block_size, spec.head_size)

    def write(self, kv_cache: torch.Tensor, slots: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
        """new: keys and values, [num_tokens, num_kv_heads, head_size] each, for slots [num_tokens] int64."""
        if self.has_contiguous_blocks:
            pool = kv_cache.view(2, self._num_sections, -1, self._spec.head_size)
            for kind, tokens in enumerate(new):
                pool[kind].index_copy_(1, slots, tokens.transpose(0, 1))
            return
        blocks, offsets = slots // self._spec.block_size, slots % self._spec.block_size
        for kind, tokens in enumerate(new):
            by_section = tokens.reshape(-1, self._num_sections, self._heads_per_section, self._spec.head_size)
            kv_cache[kind][:, blocks, :, offsets] = by_section


class Gather:
    """Blocks of one or several sequences, copied from the KV cache by one row lookup."""

    __slots__ = ("_block_ids", "_num_blocks", "_rows")

    def __init__(self, block_ids: np.ndarray) -> None:
        self._block_ids = torch.from_numpy(block_ids.astype(np.int64).reshape(-1))  # [batch * blocks]
        self._num_blocks = 0
        self._rows = self._block_ids

    def rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[2 * num_kv_heads * batch * blocks] row indices into the cache viewed as [2 * num_kv_heads * num_blocks,
        ...].

        Only the caches know the number of blocks, so the first layer of a step computes this for all layers.
        """
        kinds, num_sections, num_blocks, heads_per_section = kv_cache.shape[:4]
        if self._num_blocks != num_blocks:
            section = num_blocks * heads_per_section
            firsts = torch.arange(0, kinds * num_sections * section, section)
            if heads_per_section == 1:
                self._rows = (firsts[:, None] + self._block_ids).view(-1)
            else:
                heads = firsts[:, None] + torch.arange(heads_per_section)
                self._rows = (heads.view(-1, 1) + self._block_ids * heads_per_section).view(-1)
            self._num_blocks = num_blocks
        return self._rows

    def read(self, kv_cache: torch.Tensor, batch: int) -> torch.Tensor:
        """-> [2, num_kv_heads, batch, blocks * block_size, head_size]"""
        kinds, num_sections, _, heads_per_section, block_size, head_size = kv_cache.shape
        gathered = functional.embedding(self.rows(kv_cache), kv_cache.view(-1, block_size * head_size))
        return gathered.view(kinds, num_sections * heads_per_section, batch, -1, head_size)


@dataclass(frozen=True, slots=True)
class Context:
    """The visible keys and values of a sequence: a contiguous range of the cache, or blocks to gather."""

    num_tokens: int  # up to the sequence's end
    num_skipped: int  # tokens of the first block that are before the window
    first_slot: int  # of the contiguous range; unused with a gather
    gather: Gather | None

    def read(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """-> [2, num_kv_heads, 1, num_tokens, head_size]"""
        if self.gather is not None:
            return self.gather.read(kv_cache, 1)[:, :, :, self.num_skipped : self.num_skipped + self.num_tokens]
        kinds, num_kv_heads, _, _, _, head_size = kv_cache.shape
        slots = kv_cache.view(kinds, num_kv_heads, 1, -1, head_size)
        return slots[:, :, :, self.first_slot : self.first_slot + self.num_tokens]
