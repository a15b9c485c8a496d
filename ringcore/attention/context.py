"""What a forward pass is handed beside weights, ids and positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.metadata import AttentionMetadata

__all__ = ["ForwardContext", "GroupContext"]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What the layers of one KV cache group share in a step."""

    metadata: AttentionMetadata
    backend: AttentionBackend
    plan: object  # what the backend's `plan()` made of the metadata

    @classmethod
    def of(cls, metadata: AttentionMetadata, backend: AttentionBackend) -> GroupContext:
        return cls(metadata, backend, backend.plan(metadata))


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything a forward pass needs beside weights, ids and positions; handed down as an argument.

    Layers whose caches differ in kind are in different groups: each has block tables, slots and a backend of its own.
    """

    groups: tuple[GroupContext, ...]
    group_of_layer: tuple[int, ...]  # by attention layer: the index of its group
    kv_caches: tuple[torch.Tensor, ...]  # by attention layer, each of its backend's kv_cache_shape
