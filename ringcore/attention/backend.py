"""The seam between a model's attention layers and the code that computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import KVCacheSpec

__all__ = ["AttentionBackend"]


class AttentionBackend(ABC):
    """Paged attention for layers of one KVCacheSpec. Holds no state of a step: that is `plan`'s result."""

    name: ClassVar[str]

    def __init__(self, spec: KVCacheSpec, num_heads: int, neighbours: Sequence[KVCacheSpec] = ()) -> None:
        """`num_heads` query heads on this rank, a multiple of `spec.num_kv_heads`.

        neighbours: the specs of other layers that keep their blocks in the same memory; their pages have as many bytes.
        The layout must give block b the same bytes, no others, in the shape of each of them.
        """
        self.spec = spec
        self.num_heads = num_heads

    @classmethod
    @abstractmethod
    def refusal(cls, spec: KVCacheSpec, device: torch.device) -> str | None:
        """Why this backend cannot serve layers of `spec` on `device`; None if it can."""

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """The shape of one layer's cache tensor; its bytes are num_blocks * spec.page_size_bytes."""

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> object:
        """Whatever all layers of this step share. Valid until the next call to `plan`."""

    def plan_on_device(
        self,
        seq_lens: torch.Tensor,  # [num_seqs] int32
        block_table: torch.Tensor,  # [num_seqs, max_num_blocks] int32
    ) -> object | None:
        """`plan` for one token a sequence, of numbers that the device alone knows, and that a CUDA graph reads anew in
        every replay; a sequence of no tokens is padding. None: it needs them on the host.
        """
        return None

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        kv_cache: torch.Tensor,  # of kv_cache_shape
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_size]
        """Writes keys and values to their slots, then attends causally: over each sequence's whole context, or what
        the spec's sliding window leaves of it.

        Slots of block 0 are written like any other, and read as keys and values of nothing.
        """
