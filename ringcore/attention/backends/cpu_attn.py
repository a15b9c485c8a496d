"""Paged attention on a CPU by a C kernel, which reads pages in place: one call a layer.

It needs a C compiler; without one "auto" takes `torch_sdpa`, whose layout of pages this has, and whose rules about
numbers that must be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends.torch_sdpa_pages import PageLayout
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kernels.native.attention_kernels import AttentionStep, PageShape, attention_kernel
from ringcore.kernels.native.threads import KINDS
from ringcore.kv_cache.spec import ChunkedAttentionSpec, KVCacheSpec, MLASpec, SlidingWindowSpec

__all__ = ["CpuAttnBackend"]


class CpuAttnBackend(AttentionBackend):
    """A row's result depends on its own keys and values alone, not on the batch or on how a prompt is cut into steps:
    the spans whose partial results are merged begin at fixed positions."""

    name: ClassVar[str] = "cpu_attn"
    is_batch_invariant: ClassVar[bool] = True

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        super().__init__(spec, layers, sharing_specs)
        self._pages = PageLayout(self.spec, sharing_specs)
        kernel = attention_kernel()
        assert kernel is not None
        self._kernel = kernel
        window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
        chunk = spec.chunk_size if isinstance(spec, ChunkedAttentionSpec) else 0
        self._shape = PageShape(
            *(spec.block_size, self.spec.head_size, self.spec.value_size, self.num_heads, spec.num_kv_heads),
            *(self._pages.heads_per_section, window, chunk, TORCH_DTYPES[spec.dtype]),
        )

    @classmethod
    def refusal(
        cls,
        spec: KVCacheSpec,
        layers: Sequence[AttentionSpec],
        device: torch.device,
        sharing_specs: Sequence[KVCacheSpec] = (),
    ) -> str | None:
        if isinstance(spec, MLASpec):
            return "it attends over keys and values of heads, not over latents"
        if device.type != "cpu":
            return f"it runs on a CPU, not on {device.type}"
        if TORCH_DTYPES.get(spec.dtype) not in KINDS or spec.is_fp8:
            return "it reads float32, bfloat16 and float16"
        if not all(PageLayout.can_share(spec, other) for other in sharing_specs):
            return "layers that share its memory have other shares of keys and values in a block"
        if attention_kernel() is None:
            return "it needs a C compiler (cc, gcc or clang)"
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return self._pages.shape(num_blocks)

    def block_views(self, kv_cache: torch.Tensor) -> Sequence[torch.Tensor]:
        return [part.movedim(2, 0) for part in self._pages.parts(kv_cache)]

    def plan(self, metadata: AttentionMetadata) -> AttentionStep:
        arrays = metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.block_table_cpu
        return AttentionStep(self._shape, *arrays, metadata.slot_mapping)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: object,
        layer: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, AttentionStep)
        assert key is not None, "this backend needs the step's keys and values"
        assert value is not None
        out = query.new_empty(len(query), self.num_heads, self.spec.value_size)
        query, key, value = _with_whole_rows(query), _with_whole_rows(key), _with_whole_rows(value)
        sinks = None if sinks is None else sinks.float()
        pages = self._pages.keys_and_values(kv_cache)
        scores = layer.scale, layer.softcap or 0.0
        self._kernel(plan, query, key, value, pages, out, sinks, *scores, writes=not layer.shares_kv)
        return out


def _with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """x: [n, heads, size] -> the same numbers, the heads of a row contiguous."""
    size = x.shape[2]
    return x if x.stride(2) == 1 and (x.stride(1) == size or x.shape[1] == 1) else x.contiguous()
