"""Paged attention on a GPU whose numbers do not depend on the batch: that of `triton` by spans
(`ringcore.kernels.attention.attention_spans`).

A decode is split over programs as there, and its spans are merged in their order, as a prompt's program merges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from ringcore.attention.backends.triton import TritonBackend
from ringcore.attention.spec import AttentionSpec
from ringcore.kv_cache.spec import KVCacheSpec

if TYPE_CHECKING:
    from ringcore.kernels.attention.decode_tiling import DecodeTiling

__all__ = ["TritonRowsBackend"]


class TritonRowsBackend(TritonBackend):
    name: ClassVar[str] = "triton_rows"
    is_batch_invariant: ClassVar[bool] = True

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        super().__init__(spec, layers, sharing_specs)
        from ringcore.kernels.attention import span_agreement, span_scheduler

        sizes = self.spec.num_kv_heads, self.spec.block_size, self.spec.head_size, self.spec.value_size
        self._shape = span_agreement.HeadShape(self.num_heads, *sizes, self._window, self._chunk)
        self._decode_rows, self._span_tiling = span_agreement.decode_rows, span_scheduler.span_tiling
        self._allocate_scheduler = span_scheduler.SpanTileScheduler.allocate
        self._may_fuse = False  # cuDNN's sums are in another order

    @classmethod
    def refusal(
        cls,
        spec: KVCacheSpec,
        layers: Sequence[AttentionSpec],
        device: torch.device,
        sharing_specs: Sequence[KVCacheSpec] = (),
    ) -> str | None:
        refused = super().refusal(spec, layers, device, sharing_specs)
        return "it has no FP8" if refused is None and spec.is_fp8 else refused

    def _longest(self, max_query_len: int) -> None:
        """Nothing is chosen by a length."""

    def _tiling_for(self, num_seqs: int, device: torch.device) -> DecodeTiling:
        rows = self._decode_rows(self._shape, self.storage_dtype, device)
        return self._span_tiling(num_seqs, max(self.spec.head_size, self.spec.value_size), self.storage_dtype, rows)
