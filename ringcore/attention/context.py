"""Inputs of a forward pass other than weights, ids and positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ringcore.attention.backend import PagedBackend
from ringcore.attention.metadata import AttentionMetadata

__all__ = ["NO_TOKEN_CONTEXT", "ForwardContext", "GroupContext", "TokenContext"]


@dataclass(frozen=True, slots=True)
class TokenContext:
    """What the linears of a step may depend on token by token, besides their input. A CUDA graph is captured with
    static tensors here, as with every other input."""

    adapter_ids: torch.Tensor | None = None  # [num_tokens] int64, 0: no adapter; None: of no token


NO_TOKEN_CONTEXT = TokenContext()


@dataclass(frozen=True, slots=True)
class GroupContext:
    """Per-step data of the layers of one KV cache group."""

    metadata: AttentionMetadata
    backend: PagedBackend
    plan: object  # the result of the backend's `plan()`

    @classmethod
    def of(cls, metadata: AttentionMetadata, backend: PagedBackend) -> GroupContext:
        return cls(metadata, backend, backend.plan(metadata))


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything a forward pass needs except weights, ids and positions; passed as an argument.

    Layers whose caches differ in kind are in different groups: each has its own block tables, slot mapping and backend.
    """

    groups: tuple[GroupContext, ...]
    group_of_layer: Mapping[int, int]  # by index of an attention layer: the index of its group
    kv_caches: Mapping[int, torch.Tensor]  # likewise, each of its backend's kv_cache_shape
    tokens: TokenContext = NO_TOKEN_CONTEXT
