"""Paged attention on a GPU by kernels of our own, written in Triton.

The cache of a layer is [num_blocks, 2, num_kv_heads, block_size, head_size]: block b is one run of bytes, whatever the
shape, so layers of other shapes may keep their blocks in the same memory.

A step in which every sequence has one token takes the decode kernel, which cuts the contexts evenly over the device;
any other step takes the prefill kernel for all its sequences. Of a context nothing is read but what its tokens see.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import DTYPE_BYTES, KVCacheSpec, SlidingWindowSpec

if TYPE_CHECKING:
    from ringcore.kernels.decode_work import DecodeWork

__all__ = ["StepTensors", "TritonBackend"]

_MAX_HEAD_SIZE = 256
_ALIGNMENT = 4  # int32 numbers: kernels are compiled anew for pointers that are not at multiples of 16 bytes


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The ragged layout of a step on the device of its slots."""

    query_start_loc: torch.Tensor  # [num_seqs + 1] int32
    seq_lens: torch.Tensor  # [num_seqs] int32
    block_table: torch.Tensor  # [num_seqs, max_num_blocks] int32
    max_query_len: int

    @classmethod
    def upload(cls, metadata: AttentionMetadata) -> StepTensors:
        """In one copy."""
        arrays = (metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.block_table_cpu)
        sizes = [-(-array.size // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        packed = np.zeros(sum(sizes), dtype=np.int32)
        at = 0
        for array, size in zip(arrays, sizes, strict=True):
            packed[at : at + array.size] = array.reshape(-1)
            at += size
        parts = torch.split(torch.from_numpy(packed).to(metadata.slot_mapping.device), sizes)
        starts, lens, table = (part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True))
        return cls(starts, lens, table, metadata.max_query_len)


class TritonBackend(AttentionBackend):
    """`ringcore.kernels`, which are imported with the first backend: a machine without a GPU has no Triton."""

    name: ClassVar[str] = "triton"

    def __init__(self, spec: KVCacheSpec, num_heads: int, neighbours: Sequence[KVCacheSpec] = ()) -> None:
        super().__init__(spec, num_heads, neighbours)
        assert all(other.page_size_bytes == spec.page_size_bytes for other in neighbours)
        from ringcore.kernels import decode_work, kv_write, paged_attention_decode, paged_attention_prefill

        self._kv_write = kv_write.kv_write
        self._decode = paged_attention_decode.paged_attention_decode
        self._prefill = paged_attention_prefill.paged_attention_prefill
        self._allocate_work = decode_work.DecodeWork.allocate
        self._window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        self._work: DecodeWork | None = None  # of the first step's device

    @classmethod
    def refusal(cls, spec: KVCacheSpec, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it runs on a CUDA device, not on {device.type}"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if spec.dtype not in DTYPE_BYTES:
            return f"it has no dtype {spec.dtype}"
        if spec.head_size % 8 or not 16 <= spec.head_size <= _MAX_HEAD_SIZE:
            return f"its heads have a multiple of 8 from 16 to {_MAX_HEAD_SIZE} numbers, not {spec.head_size}"
        if spec.block_size % 16:
            return f"its blocks have a multiple of 16 tokens, not {spec.block_size}"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, 2, self.spec.num_kv_heads, self.spec.block_size, self.spec.head_size)

    def plan(self, metadata: AttentionMetadata) -> StepTensors:
        step = StepTensors.upload(metadata)
        if step.max_query_len == 1:
            self._decode_work(step.seq_lens.device).plan(step.seq_lens)
        return step

    def plan_on_device(self, seq_lens: torch.Tensor, block_table: torch.Tensor) -> StepTensors:
        self._decode_work(seq_lens.device).plan(seq_lens)
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        return StepTensors(starts, seq_lens, block_table, max_query_len=1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: object,
        scale: float,
    ) -> torch.Tensor:
        assert isinstance(plan, StepTensors)
        self._kv_write(key, value, kv_cache, metadata.slot_mapping)
        if plan.max_query_len == 1:
            work = self._decode_work(query.device)
            return self._decode(query, kv_cache, plan.block_table, plan.seq_lens, work, scale)
        return self._prefill(
            query,
            kv_cache,
            plan.block_table,
            plan.seq_lens,
            plan.query_start_loc,
            scale,
            max_query_len=plan.max_query_len,
            window=self._window,
        )

    def _decode_work(self, device: torch.device) -> DecodeWork:
        if self._work is None:
            spec = self.spec
            self._work = self._allocate_work(
                self.num_heads,
                spec.num_kv_heads,
                spec.head_size,
                getattr(torch, spec.dtype),
                device,
                window=self._window,
            )
        return self._work
