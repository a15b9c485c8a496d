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
    # Whether `forward` takes no keys and values where they stand in their slots already. Then the cache of a layer is
    # [num_blocks, 2, num_kv_heads, block_size, head_size], keys then values.
    takes_written_kv: ClassVar[bool] = False

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

    def set_up(self, num_tokens: int, max_len: int, device: torch.device) -> None:  # noqa: B027  most need nothing
        """Has libraries load and compile what prompts of up to `max_len` tokens need, in steps of up to `num_tokens`.

        A thread of its own may call it. Nothing depends on it: without it the first such step does all that.
        """

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> object:
        """Whatever all layers of this step share. Valid until the next call to `plan`."""

    def plan_on_device(
        self,
        seq_lens: torch.Tensor,  # [num_seqs] int32
        block_table: torch.Tensor,  # [num_seqs, max_num_blocks] int32
    ) -> object | None:
        """`plan` for one token a sequence, of numbers that the device alone knows, and that a CUDA graph reads anew in
        every replay. A sequence of no tokens, wherever it stands, is padding or has stopped: `forward` may leave its
        row as it is, and gives the others what they would get without it. None: it needs them on the host.
        """
        return None

    def plan_mixed_on_device(
        self,
        query_start_loc: torch.Tensor,  # [num_seqs + 1] int32
        seq_lens: torch.Tensor,  # [num_seqs] int32
        block_table: torch.Tensor,  # [num_seqs, max_num_blocks] int32
        decode_seq_lens: torch.Tensor,  # [any number up to num_seqs] int32
        num_tokens: int,
    ) -> object | None:
        """`plan_on_device` for a step of `num_tokens` tokens, padding among them, that sequences share in any way.

        Sequences that decode come first: sequence i has token i, and decode_seq_lens[i] tokens in all. Of every other
        one decode_seq_lens is 0. The others own the tokens query_start_loc[i] to query_start_loc[i + 1], and in
        query_start_loc those that decode have none: with d of them its first d + 1 numbers are d. A sequence that is
        padding has no tokens in either, so the last number is the number of the step's tokens. `forward` leaves the
        rows of tokens that no sequence has as they are, which may be anything. None: it needs the numbers on the host.
        """
        return None

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size]
        key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_size]
        value: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_size]
        kv_cache: torch.Tensor,  # of kv_cache_shape
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_size]
        """Writes keys and values to their slots, then attends causally: over each sequence's whole context, or what
        the spec's sliding window leaves of it. None in place of both: they stand in their slots already.

        Slots of block 0 are written like any other, and read as keys and values of nothing.
        """
