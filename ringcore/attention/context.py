"""What a forward pass is handed beside weights, ids and positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.metadata import AttentionMetadata

__all__ = ["ForwardContext"]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Everything a forward pass needs beside weights, ids and positions; handed down as an argument.

    `plan` is what the backend's `plan()` made of the metadata, once for all layers of the step.
    """

    metadata: AttentionMetadata
    backend: AttentionBackend
    plan: object
    kv_caches: tuple[torch.Tensor, ...]  # by attention layer, each of the backend's kv_cache_shape
