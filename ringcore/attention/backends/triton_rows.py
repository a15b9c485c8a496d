"""Paged attention on a GPU whose numbers do not depend on the batch: all tokens by the prefill kernel, in tiles of one
size, whose rows see every tile of keys from the start of their context on in order, without splits.

A decode is a chunk of one token. So one program reads a whole context, and a long one decodes more slowly than with the
split-KV kernel, the more so in a small batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ringcore.attention.backends.step_tensors import StepTensors
from ringcore.attention.backends.triton import Chunks, TritonBackend, TritonStep
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kernels.upload import upload_packed
from ringcore.kv_cache.spec import KVCacheSpec

__all__ = ["TritonRowsBackend"]


class TritonRowsBackend(TritonBackend):
    name: ClassVar[str] = "triton_rows"
    is_batch_invariant: ClassVar[bool] = True

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

    def warm_up(self, num_tokens: int, max_len: int, device: torch.device) -> None:
        """Nothing: no library but Triton."""

    def plan(self, metadata: AttentionMetadata) -> TritonStep:
        arrays = metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.block_table_cpu
        starts, lens, table = upload_packed(arrays, metadata.slot_mapping.device)
        return TritonStep(None, (Chunks(StepTensors(starts, lens, table, None), slice(None)),))

    def plan_on_device(self, seq_lens: torch.Tensor, block_table: torch.Tensor) -> TritonStep:
        return TritonStep(None, (self._of_single_tokens(seq_lens, block_table),))

    def plan_mixed_on_device(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        decode_seq_lens: torch.Tensor,
        num_tokens: int,
    ) -> TritonStep:
        """Decodes first: they leave rows without meaning where no decode is, which the others then write."""
        decodes = self._of_single_tokens(decode_seq_lens, block_table[: len(decode_seq_lens)])
        others = Chunks(StepTensors(query_start_loc, seq_lens, block_table, None), slice(None))
        return TritonStep(None, (decodes, others))

    def _of_single_tokens(self, seq_lens: torch.Tensor, block_table: torch.Tensor) -> Chunks:
        """Sequence i has token i."""
        count = len(seq_lens)
        starts = torch.arange(count + 1, dtype=torch.int32, device=seq_lens.device)
        return Chunks(StepTensors(starts, seq_lens, block_table[:count], None), slice(0, count))
