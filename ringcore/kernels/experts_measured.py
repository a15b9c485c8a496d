"""The fastest tiles of the grouped products of published mixtures, as measured on an H200 (`python -m benchmarks
gpu_experts`): single products in CUDA graphs, routing of random tokens, weights from memory."""

from __future__ import annotations

from collections.abc import Mapping

from ringcore.kernels.skinny_tiles import DotConfig

__all__ = ["MEASURED"]

Shape = tuple[int, int, int, int]  # num_experts, k, num_weights (of gate and up together), num_inputs

# Of a shape: by the largest number of tokens, and for all from the one before it on.
MEASURED: Mapping[Shape, Mapping[int, DotConfig]] = {}
