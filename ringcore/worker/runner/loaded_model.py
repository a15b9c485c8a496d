"""A model with its weights on this rank's device."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ringcore.config import EngineConfig
from ringcore.config.options import CacheConfig
from ringcore.distributed.parallel import ONLY_STAGE, Stage, TensorParallel
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kv_cache.spec import KVCacheSpec
from ringcore.model_executor.arithmetic import arithmetic_of
from ringcore.model_executor.linear_schemes.searched_scheme import SearchedTiles
from ringcore.model_executor.loader import pending_weights, read_again
from ringcore.model_executor.models import build_head, build_model
from ringcore.model_executor.models.base import CausalLM
from ringcore.protocol.expert_placement import ExpertLoad
from ringcore.worker.memory.host_memory import HugePageChunks
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.kernel_tiles import searched_tiles

__all__ = ["BuiltModel", "LoadedModel"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """tensors: the model's, by `Weight.name`, where their addresses are fixed, so that a weight update can overwrite
    them; None where the model holds them packed. reload_head: reads the weights of the head that drafts from its files
    again; None: there is no head, or it holds them packed."""

    model: CausalLM
    dtype: str
    weights_bytes: int
    load_s: float
    tensors: Mapping[str, torch.Tensor] | None = None
    reload_head: Callable[[], None] | None = None
    tiles: SearchedTiles | None = None  # with `kernel_autotune`

    def kv_cache_spec(self, cache: CacheConfig) -> dict[str, KVCacheSpec]:
        return _kv_cache_spec(self.model, self.dtype, cache)

    @torch.inference_mode()
    def expert_loads(self) -> list[ExpertLoad]:
        """Of each layer whose experts may be placed anew, since the call before."""
        return [ExpertLoad(one.take_counts(), list(one.placement.experts)) for one in self.model.expert_slots]

    @torch.inference_mode()
    def place_experts(self, layer: int, experts: Sequence[int]) -> int:
        """layer: an index of `expert_loads`; experts: of each slot -> the bytes written."""
        slots = self.model.expert_slots[layer]
        return slots.move(replace(slots.placement, experts=tuple(experts)))


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """Without its weights."""

    model: CausalLM
    dtype: str
    build_s: float
    tiles: SearchedTiles | None = None

    @classmethod
    def of(cls, config: EngineConfig, platform: Platform, tp: TensorParallel, stage: Stage = ONLY_STAGE) -> BuiltModel:
        """Raises `ModelLoadError` for a model that cannot be computed, `ConfigError` for a KV cache that it cannot
        have."""
        start = time.monotonic()
        dtype = platform.resolve_dtype(config.model.dtype, config.model.spec.dtype)
        tiles = searched_tiles(config.device, platform.device)
        arithmetic = arithmetic_of(config.model.deterministic, platform.device, tiles)
        model = build_model(
            config.model.spec,
            tp,
            TORCH_DTYPES[dtype],
            config.model.context_len,
            stage=stage,
            expert_parallel=config.parallel.expert_parallel,
            redundant_experts=config.parallel.redundant_experts,
            arithmetic=arithmetic,
        )
        if config.model.draft_head is not None:
            most = config.scheduler.token_budget + config.scheduler.max_sampled_positions
            given = tp, TORCH_DTYPES[dtype], config.model.context_len, most
            index = 1 + max(layer.index for layer in model.attention_layers)
            experts = config.parallel.expert_parallel
            model.attach(build_head(config.model.draft_head, index, *given, expert_parallel=experts))
        _kv_cache_spec(model, dtype, config.cache)  # what is refused, is before the weights are read
        return cls(model, dtype, time.monotonic() - start, tiles)

    def kv_cache_spec(self, cache: CacheConfig) -> dict[str, KVCacheSpec]:
        return _kv_cache_spec(self.model, self.dtype, cache)

    @property
    def weights_bytes(self) -> int:
        head = self.model.draft_head
        return sum(weight.nbytes for weight in [*self.model.weights(), *([] if head is None else head.weights())])

    @torch.inference_mode()
    def load(
        self, config: EngineConfig, platform: Platform, allocated: Callable[[], None] | None = None
    ) -> LoadedModel:
        """allocated: called when the memory of all weights is allocated, before the model's are read into it; never
        called for packed weights. Raises `ModelLoadError` where the checkpoint does not fit the model."""
        start, model = time.monotonic(), self.model
        # A CPU packs weights one by one and frees the originals; sleep mode needs them at fixed addresses instead.
        is_packed = platform.device.type == "cpu" and not config.device.enable_sleep_mode
        reload_head = self._load_head(config, platform, is_packed)
        allocate = None if is_packed else partial(_allocate, platform, allocated)
        given = model.weights(), config.model.files, config.model.seed, platform.device
        with pending_weights(*given, allocate, model.may_ignore, HugePageChunks().allocate) as tensors:
            final = tensors.final
            model.bind(tensors, updatable=final is not None)
        platform.synchronize()
        seconds = time.monotonic() - start
        return LoadedModel(model, self.dtype, self.weights_bytes, seconds, final, reload_head, self.tiles)

    def _load_head(self, config: EngineConfig, platform: Platform, is_packed: bool) -> Callable[[], None] | None:
        """Before the model's weights, and no part of a weight update -> `LoadedModel.reload_head`."""
        head, spec = self.model.draft_head, config.model.draft_head
        if head is None or spec is None:
            return None
        allocate = None if is_packed else partial(_allocate, platform, None)
        weights, device = head.weights(), platform.device
        given, is_known = (weights, spec.files, config.model.seed), lambda name: True  # checked with the options
        with pending_weights(*given, device, allocate, is_known) as tensors:
            final = tensors.final
            head.bind(tensors, self.model.embed, self.model.compute_logits, updatable=final is not None)
        if final is None:
            return None

        def reload_head() -> None:
            read_again(*given, final, device)
            head.refresh()

        return reload_head


def _kv_cache_spec(model: CausalLM, dtype: str, cache: CacheConfig) -> dict[str, KVCacheSpec]:
    """By layer name."""
    options = cache.block_size, dtype, cache.is_fp8
    return {layer.name: layer.kv_cache_spec(*options) for layer in model.attention_layers}


def _allocate(platform: Platform, allocated: Callable[[], None] | None, num_bytes: int) -> torch.Tensor:
    memory = platform.allocate(num_bytes, "weights")
    if allocated is not None:
        allocated()
    return memory
