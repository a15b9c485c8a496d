"""Paged attention on a GPU by the Triton kernels of `ringcore.kernels`.

The cache of a layer is as in `kernels/attention/page_layout.py`: block b is one contiguous byte range in every shape,
so layers of other shapes may share the same memory.

Decodes (one token per sequence, first in the step) take the split-KV decode kernel, which balances them over the device
and reads a common prefix of many once; others take the prefill kernel, but long prompts without cached tokens cuDNN's
fused attention, unless a layer of the group has a softcap or sinks. Only the visible part of a context is read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from ringcore.attention.backend import AttentionBackend, SingleTokens
from ringcore.attention.backends.fused_prompts import (
    Prompts,
    attend_prompts,
    batches_of_equal_length,
    can_fuse,
    split_by_kernel,
    warm_up_fused_prompts,
)
from ringcore.attention.backends.step_tensors import StepTensors
from ringcore.attention.backends.triton_step import Chunks, Decodes, Scores, TritonStep
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kernels.launch.upload import upload_packed
from ringcore.kv_cache.spec import DTYPE_BYTES, ChunkedAttentionSpec, HeadsSpec, KVCacheSpec, MLASpec, SlidingWindowSpec

if TYPE_CHECKING:
    from ringcore.kernels.attention.decode_scheduler import DecodeTileScheduler
    from ringcore.kernels.attention.decode_tiling import DecodeTiling
    from ringcore.kernels.attention.head_rotation import HeadRotation

__all__ = ["TritonBackend"]

_MAX_HEAD_SIZE = 256
_FP8_SINCE = (8, 9)  # compute capability


def _fp8_refusal(spec: HeadsSpec, device: torch.device) -> str | None:
    """Why the kernels do not serve FP8 layers of `spec`."""
    if spec.v_head_size is not None:
        return f"in FP8 its values are as wide as its keys, {spec.head_size}, not {spec.v_head_size}"
    if spec.head_size % 16:
        return f"in FP8 its heads have a multiple of 16 numbers, not {spec.head_size}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _FP8_SINCE:
        return "in FP8 it needs a GPU of compute capability 8.9 (Ada, Hopper) or later"
    return None


class TritonBackend(AttentionBackend):
    """Imports `ringcore.kernels` with the first instance: a machine without a GPU has no Triton."""

    name: ClassVar[str] = "triton"
    accepts_prewritten_kv: ClassVar[bool] = True

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        super().__init__(spec, layers, sharing_specs)
        assert all(other.page_size_bytes == spec.page_size_bytes for other in sharing_specs)
        from ringcore.kernels.attention import (
            decode_scheduler,
            decode_tiling,
            kv_write,
            page_layout,
            paged_attention_decode,
            paged_attention_prefill,
            prefix_tiling,
            prompt_padding,
            shared_prefixes,
        )

        self._kv_write = kv_write.kv_write
        self._gather_padded_kv, self._pad_prompts = prompt_padding.gather_padded_kv, prompt_padding.pad_prompts
        self._decode = paged_attention_decode.paged_attention_decode
        self._prefill = paged_attention_prefill.paged_attention_prefill
        self._tiling = decode_tiling.DecodeTiling
        self._allocate_scheduler = decode_scheduler.DecodeTileScheduler.allocate
        self._choose_prefix_tiling = prefix_tiling.PrefixTiling.choose
        self._find_shared_prefixes = shared_prefixes.find_shared_prefixes
        self._cache_shape = page_layout.PageLayout.shape
        self._window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
        self._chunk = spec.chunk_size if isinstance(spec, ChunkedAttentionSpec) else None
        self._may_fuse = all(layer.is_plain for layer in layers)  # a plan serves every layer
        self._tile_schedulers: dict[DecodeTiling, DecodeTileScheduler] = {}  # of the first step's device

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
        if device.type != "cuda":
            return f"it runs on a CUDA device, not on {device.type}"
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if spec.dtype not in DTYPE_BYTES:
            return f"it has no dtype {spec.dtype}"
        for size in (spec.head_size, spec.value_size):
            if size % 8 or not 16 <= size <= _MAX_HEAD_SIZE:
                return f"its heads have a multiple of 8 from 16 to {_MAX_HEAD_SIZE} numbers, not {size}"
        if spec.block_size % 16:
            return f"its blocks have a multiple of 16 tokens, not {spec.block_size}"
        return _fp8_refusal(spec, device) if spec.is_fp8 else None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        spec = self.spec
        sizes = spec.num_kv_heads, spec.block_size, spec.head_size, spec.value_size
        return self._cache_shape(num_blocks, *sizes, spec.is_fp8)

    def warm_up(self, num_tokens: int, max_len: int, device: torch.device) -> None:
        if self._may_fuse:
            warm_up_fused_prompts(self.spec, self.num_heads, num_tokens, max_len, device)

    def plan(self, metadata: AttentionMetadata) -> TritonStep:
        count = metadata.num_seqs if metadata.max_query_len == 1 else metadata.num_decodes
        device = metadata.slot_mapping.device
        starts, lens, table = metadata.query_start_loc_cpu, metadata.seq_lens_cpu, metadata.block_table_cpu
        groups = split_by_kernel(metadata, count, self._fuses_on(device))
        chunks = [(starts[a : b + 1] - starts[a], lens[a:b], table[a:b]) for a, b, is_fused in groups if not is_fused]
        uploaded = iter(
            upload_packed([lens[:count], table[:count], *(array for arrays in chunks for array in arrays)], device)
        )
        decode_lens, decode_table = next(uploaded), next(uploaded)
        others: list[Chunks | Prompts] = []
        for first, end, is_fused in groups:
            if is_fused:
                others += batches_of_equal_length(int(starts[first]), lens[first:end].tolist())
            else:
                longest = self._longest(metadata.max_query_len)
                tensors = StepTensors(next(uploaded), next(uploaded), next(uploaded), longest)
                others.append(Chunks(tensors, slice(int(starts[first]), int(starts[end]))))
        return TritonStep(self._plan_decodes(decode_lens, decode_table) if count else None, tuple(others))

    def plan_on_device(
        self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, one_token_each: bool = False
    ) -> TritonStep:
        return TritonStep(self._plan_decodes(seq_lens, block_table, skips_empty=True, reads_early=one_token_each))

    def plan_mixed_on_device(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        decode_seq_lens: torch.Tensor,
        num_tokens: int,
    ) -> TritonStep:
        assert len(decode_seq_lens) <= min(num_tokens, len(seq_lens))
        decodes = self._plan_decodes(decode_seq_lens, block_table, skips_empty=True, reads_early=True)
        others = StepTensors(query_start_loc, seq_lens, block_table, self._longest(num_tokens))
        return TritonStep(decodes, (Chunks(others, slice(None)),))

    def has_host_kernels(self, metadata: AttentionMetadata) -> bool:
        """cuDNN's, of long prompts without cached tokens: its plan depends on their lengths."""
        groups = split_by_kernel(metadata, metadata.num_decodes, self._fuses_on(metadata.slot_mapping.device))
        return any(is_fused for _, _, is_fused in groups)

    def _fuses_on(self, device: torch.device) -> bool:
        return self._may_fuse and can_fuse(self.spec, device)

    def _plan_decodes(
        self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, skips_empty: bool = False, reads_early: bool = False
    ) -> Decodes:
        """skips_empty: trailing empty sequences get no tiles and no output: they would be the last to end."""
        tile_scheduler = self._tile_scheduler_for(len(seq_lens), seq_lens.device)
        tiling = self._choose_prefix_tiling(tile_scheduler, len(seq_lens), self.spec.block_size, self.storage_dtype)
        shared = None if tiling is None else self._find_shared_prefixes(block_table, seq_lens, tiling)
        tile_scheduler.plan(seq_lens, None if shared is None else shared.words, skips_empty=skips_empty)
        return Decodes(seq_lens, block_table, tile_scheduler, shared, reads_early)

    def _longest(self, max_query_len: int) -> int | None:
        """By which the tiles of prompts are chosen."""
        return max_query_len

    def _tiling_for(self, num_seqs: int, device: torch.device) -> DecodeTiling:
        sizes, group = (self.spec.head_size, self.spec.value_size), self.num_heads // self.spec.num_kv_heads
        dtypes = TORCH_DTYPES[self.spec.dtype], self.storage_dtype
        by_warps = self._tiling.choose_by_warps(num_seqs, sizes, dtypes, group, device)
        return by_warps or self._tiling.choose(num_seqs, max(sizes), self.storage_dtype, group=group)

    def _tile_scheduler_for(self, num_seqs: int, device: torch.device) -> DecodeTileScheduler:
        spec, tiling = self.spec, self._tiling_for(num_seqs, device)
        if tiling not in self._tile_schedulers:
            shape = (self.num_heads, spec.num_kv_heads, spec.head_size)
            self._tile_schedulers[tiling] = self._allocate_scheduler(
                *shape, tiling, device, v_head_size=spec.value_size, window=self._window, chunk=self._chunk
            )
        return self._tile_schedulers[tiling]

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
        assert isinstance(plan, TritonStep)
        if key is not None and value is not None and not layer.shares_kv:
            self._kv_write(key, value, kv_cache, metadata.slot_mapping)
        out = query.new_empty(query.shape[0], self.num_heads, self.spec.value_size)
        scores = Scores(layer.scale, layer.softcap, sinks)
        if plan.decodes is not None:
            self._decode_forward(plan.decodes, query, kv_cache, scores, out)
        for item in plan.others:
            rows = item.tokens
            match item:
                case Chunks():
                    self._prefill_forward(item.tensors, query[rows], kv_cache, scores, out[rows])
                case Prompts():
                    lens = item.query_len, item.padded_len
                    if key is None or value is None or self.spec.is_fp8:  # in FP8 as they are read later
                        kv = self._gather_padded_kv(kv_cache, metadata.slot_mapping[rows], *lens, query.dtype)
                    else:
                        kv = self._pad_prompts(key[rows], *lens), self._pad_prompts(value[rows], *lens)
                    attend_prompts(item, query[rows], *kv, layer.scale, out[rows])
        return out

    def rotates(self, plan: object) -> bool:
        assert isinstance(plan, TritonStep)
        return plan.decodes is not None and plan.decodes.rotates and not plan.others and not self.spec.is_fp8

    def single_tokens(self, plan: object) -> SingleTokens | None:
        return plan.single_tokens if isinstance(plan, TritonStep) else None

    def forward_unrotated(
        self,
        qkv: torch.Tensor,
        rotation: HeadRotation,
        kv_cache: torch.Tensor,
        plan: object,
        layer: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(plan, TritonStep)
        assert plan.decodes is not None
        query = qkv.view(len(qkv), -1, self.spec.head_size)[:, : self.num_heads]
        out = query.new_empty(query.shape)
        scores = Scores(layer.scale, layer.softcap, sinks)
        self._decode_forward(plan.decodes, query, kv_cache, scores, out, rotation)
        return out

    def _decode_forward(
        self,
        decodes: Decodes,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        scores: Scores,
        out: torch.Tensor,
        rotation: HeadRotation | None = None,
    ) -> None:
        count = len(decodes.seq_lens)
        self._decode(
            query[:count],
            kv_cache,
            decodes.block_table,
            decodes.seq_lens,
            decodes.tile_scheduler,
            scores.scale,
            shared=decodes.shared,
            softcap=scores.softcap,
            sinks=scores.sinks,
            out=out[:count],
            reads_early=decodes.reads_early,
            rotation=rotation,
        )

    def _prefill_forward(
        self, step: StepTensors, query: torch.Tensor, kv_cache: torch.Tensor, scores: Scores, out: torch.Tensor
    ) -> None:
        scale, softcap, sinks = scores
        self._prefill(
            query,
            kv_cache,
            step.block_table,
            step.seq_lens,
            step.query_start_loc,
            scale,
            max_query_len=step.max_query_len,
            window=self._window,
            chunk=self._chunk,
            softcap=softcap,
            sinks=sinks,
            out=out,
        )
