"""A model over its paged KV cache: the forward pass of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ringcore.attention.backend import PagedBackend
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.model_executor.models.base import CausalLM
from ringcore.worker.memory.block_pages import BlockPages
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.runner.kv_caches import allocate_kv_caches, choose_backends, group_of_layer

__all__ = ["PagedModel"]


@dataclass(frozen=True, slots=True)
class PagedModel:
    """The model, the attention backend of each KV cache group, and the KV cache of each attention layer."""

    model: CausalLM
    backends: tuple[PagedBackend, ...]  # by group
    group_of_layer: Mapping[int, int]  # this and the next by index of an attention layer
    kv_caches: Mapping[int, torch.Tensor]

    @classmethod
    def allocate(
        cls,
        model: CausalLM,
        backend: str,
        plan: KVCacheConfig,
        platform: Platform,
        is_batch_invariant: bool = False,
    ) -> PagedModel:
        """Allocates the pages of `plan`. backend, is_batch_invariant: the engine options attention_backend and
        deterministic. Raises `CapacityError` or `ConfigError`."""
        layers = model.attention_layers
        backends = choose_backends(backend, plan, layers, platform, is_batch_invariant)
        kv_caches = allocate_kv_caches(plan, layers, backends, platform)
        return cls(model, tuple(backends), group_of_layer(plan, layers), kv_caches)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, groups: Sequence[GroupContext]) -> torch.Tensor:
        """groups: by KV cache group; otherwise as `CausalLM.forward`."""
        return self.model.forward(inputs, positions, ForwardContext(tuple(groups), self.group_of_layer, self.kv_caches))

    def forward_batch(self, inputs: torch.Tensor, batch: InputBatch) -> torch.Tensor:
        """As `forward`, planned on the host."""
        return self.forward(inputs, batch.positions, self._plan(batch))

    def _plan(self, batch: InputBatch) -> list[GroupContext]:
        return [GroupContext.of(*group) for group in zip(batch.metadata, self.backends, strict=True)]

    def block_pages(self) -> BlockPages:
        """The pages of the blocks. Layers that share memory are one: the groups map a block to the same bytes."""
        by_address = {
            cache.data_ptr(): self.backends[self.group_of_layer[layer]].block_views(cache)
            for layer, cache in self.kv_caches.items()
        }
        return BlockPages([view for _, views in sorted(by_address.items()) for view in views])

    def zero_kv(self, batch: InputBatch) -> None:
        """Zeroes the keys and values of the tokens of `batch`, by the write path that every backend has."""
        groups = self._plan(batch)
        for layer in self.model.attention_layers:
            layer.zero_kv(groups[self.group_of_layer[layer.index]], self.kv_caches[layer.index])
