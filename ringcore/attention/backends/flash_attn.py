"""Paged attention by the flash-attn package: FlashAttention-3's `flash_attn_interface` or version 2's `flash_attn`.

The cache of a layer is [num_blocks, 2, num_kv_heads, block_size, head_size], keys then values, head-major. Both
versions take pages as [num_blocks, block_size, num_kv_heads, head_size] of any strides but the last, which is 1, so
they get that view of it. Neither is a dependency; the backend refuses if neither can be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends.step_tensors import StepTensors
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kernels.launch.upload import upload
from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheSpec, MLASpec

__all__ = ["FlashAttnBackend"]

_MODULES = ("flash_attn_interface", "flash_attn")  # version 3 first
_BLOCK_MULTIPLE = {"flash_attn_interface": 16, "flash_attn": 256}


@dataclass(frozen=True, slots=True)
class _Step:
    tensors: StepTensors
    context_start_loc: torch.Tensor | None  # [num_seqs + 1] int32: the sums of seq_lens, for version 2
    max_seq_len: int


class FlashAttnBackend(AttentionBackend):
    name: ClassVar[str] = "flash_attn"
    accepts_prewritten_kv: ClassVar[bool] = True

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        super().__init__(spec, layers, sharing_specs)
        assert all(other.page_size_bytes == spec.page_size_bytes for other in sharing_specs)
        from ringcore.kernels.attention import kv_write

        self._kv_write = kv_write.kv_write
        module, _ = _find_module()
        assert module is not None, "constructed a backend that refuses"
        self._is_version_3 = module == _MODULES[0]
        self._attend = _function(module)

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
            return "the package triton, which writes keys and values, is not installed"
        module, reasons = _find_module()
        if module is None:
            return reasons
        if spec.is_fp8:
            return "it has no FP8 with a scale for each token and head"
        if spec.dtype not in ("float16", "bfloat16"):
            return f"it has no dtype {spec.dtype}"
        if spec.head_size % 8 or spec.head_size > 256:
            return f"its heads have a multiple of 8 up to 256 numbers, not {spec.head_size}"
        if spec.block_size % _BLOCK_MULTIPLE[module]:
            return f"the blocks of {module} have a multiple of {_BLOCK_MULTIPLE[module]} tokens, not {spec.block_size}"
        if not isinstance(spec, FullAttentionSpec):
            # A masked score has the weight 0, and 0 * inf is NaN: one request could corrupt another.
            return "it reads blocks that a sliding window or chunk has passed, which other requests may own by now"
        return _refused_feature(spec, layers, module)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, 2, self.spec.num_kv_heads, self.spec.block_size, self.spec.head_size)

    def plan(self, metadata: AttentionMetadata) -> _Step:
        tensors, sums = StepTensors.of(metadata), None
        if not self._is_version_3:
            array = np.concatenate(([0], np.cumsum(metadata.seq_lens_cpu))).astype(np.int32)
            sums = upload(array, metadata.slot_mapping.device)
        return _Step(tensors, sums, metadata.max_seq_len)

    def plan_on_device(
        self, seq_lens: torch.Tensor, block_table: torch.Tensor, *, one_token_each: bool = False
    ) -> _Step | None:
        if not self._is_version_3:  # version 2 must know the longest sequence
            return None
        starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
        longest = block_table.shape[1] * self.spec.block_size
        return _Step(StepTensors(starts, seq_lens, block_table, max_query_len=1), None, longest)

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
        assert isinstance(plan, _Step)
        options = {"softmax_scale": layer.scale, "causal": True}
        if layer.softcap is not None:
            options["softcap"] = layer.softcap
        if key is not None and value is not None and not layer.shares_kv:
            self._kv_write(key, value, kv_cache, metadata.slot_mapping)
        step, (keys, values) = plan.tensors, kv_cache.transpose(2, 3).unbind(1)
        if self._is_version_3:
            return self._attend(
                query,
                keys,
                values,
                cache_seqlens=step.seq_lens,
                page_table=step.block_table,
                cu_seqlens_q=step.query_start_loc,
                max_seqlen_q=step.max_query_len,
                **options,
            )
        return self._attend(
            query,
            keys,
            values,
            cu_seqlens_q=step.query_start_loc,
            cu_seqlens_k=plan.context_start_loc,
            max_seqlen_q=step.max_query_len,
            max_seqlen_k=plan.max_seq_len,
            block_table=step.block_table,
            **options,
        )


def _function(module: str) -> Callable[..., torch.Tensor]:
    """What attends, of version 3 or 2."""
    name = "flash_attn_with_kvcache" if module == _MODULES[0] else "flash_attn_varlen_func"
    function: Callable[..., torch.Tensor] = getattr(importlib.import_module(module), name)
    return function


def _refused_feature(spec: FullAttentionSpec, layers: Sequence[AttentionSpec], module: str) -> str | None:
    """What of `layers` the arguments of the module's function do not express."""
    if spec.v_head_size is not None:
        return f"its values have as many numbers as its keys, {spec.head_size}, not {spec.v_head_size}"
    if any(layer.has_sinks for layer in layers):
        return "it has no attention sinks"
    has_softcap = any(layer.softcap is not None for layer in layers)
    if has_softcap and "softcap" not in inspect.signature(_function(module)).parameters:
        return f"this version of {module} has no softcap"
    return None


def _find_module() -> tuple[str | None, str]:
    """(the first of `_MODULES` that can be imported, or None; why those before it cannot)"""
    reasons = []
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except (ImportError, OSError) as error:  # OSError: a library of another CUDA
            reasons.append(f"{name} cannot be imported: {error}")
        else:
            return name, ""
    return None, ", ".join(reasons)
