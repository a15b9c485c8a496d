"""The fastest tiles of the grouped products of published mixtures, as measured on an H200 (`python -m benchmarks
gpu_experts`): single products in CUDA graphs, routing of random tokens, weights from memory."""

from __future__ import annotations

from collections.abc import Mapping

from ringcore.kernels.linears.skinny_tiles import DotConfig

__all__ = ["MEASURED", "MEASURED_E2M1", "MEASURED_FP8"]

Shape = tuple[int, int, int, int]  # num_experts, k, num_weights (of gate and up together), num_inputs

_ANY = 1 << 30  # tokens

# Of a shape: by the largest number of tokens, and for all from the one before it on.
MEASURED: Mapping[Shape, Mapping[int, DotConfig]] = {
    (128, 8, 1536, 2048): {
        8: DotConfig(64, 128, 4, 5, 1, block_rows=16),
        32: DotConfig(64, 128, 4, 5, 1, block_rows=16),
        64: DotConfig(64, 128, 4, 5, 1, block_rows=16),
        256: DotConfig(128, 64, 4, 4, 1, block_rows=32),
        1024: DotConfig(128, 64, 4, 3, 1, block_rows=128),
        _ANY: DotConfig(128, 64, 8, 4, 1, block_rows=256),
    },
    (128, 8, 2048, 768): {
        8: DotConfig(128, 128, 8, 3, 1, block_rows=16),
        32: DotConfig(128, 128, 4, 3, 1, block_rows=16),
        64: DotConfig(128, 128, 8, 3, 1, block_rows=16),
        256: DotConfig(256, 64, 8, 3, 1, block_rows=32),
        1024: DotConfig(128, 64, 4, 3, 1, block_rows=128),
        _ANY: DotConfig(128, 64, 4, 3, 1, block_rows=128),
    },
    (64, 6, 2816, 2048): {
        8: DotConfig(128, 128, 8, 3, 1, block_rows=16),
        32: DotConfig(64, 128, 4, 5, 1, block_rows=16),
        64: DotConfig(64, 128, 4, 5, 1, block_rows=16),
        256: DotConfig(256, 64, 8, 3, 1, block_rows=32),
        1024: DotConfig(128, 64, 4, 4, 1, block_rows=128),
    },
    (64, 6, 2048, 1408): {
        8: DotConfig(128, 64, 4, 4, 1, block_rows=16),
        32: DotConfig(128, 128, 8, 3, 1, block_rows=16),
        64: DotConfig(128, 128, 8, 3, 1, block_rows=16),
        256: DotConfig(128, 64, 8, 4, 1, block_rows=32),
        1024: DotConfig(128, 64, 4, 4, 1, block_rows=128),
    },
}

# As `MEASURED`, of weights in FP8 with rows rounded to it.
MEASURED_FP8: Mapping[Shape, Mapping[int, DotConfig]] = {
    (128, 8, 1536, 2048): {
        2: DotConfig(128, 128, 8, 4, 1, block_rows=16),
        8: DotConfig(64, 128, 4, 4, 1, block_rows=16),
        32: DotConfig(64, 128, 4, 6, 1, block_rows=16),
        64: DotConfig(64, 128, 4, 6, 1, block_rows=16),
        256: DotConfig(128, 128, 4, 4, 1, block_rows=32),
        1024: DotConfig(128, 128, 4, 4, 1, block_rows=64),
    },
    (128, 8, 2048, 768): {
        2: DotConfig(256, 128, 8, 4, 1, block_rows=16),
        8: DotConfig(64, 128, 4, 2, 1, block_rows=16),
        32: DotConfig(128, 128, 4, 4, 1, block_rows=16),
        64: DotConfig(128, 128, 4, 4, 1, block_rows=16),
        256: DotConfig(64, 128, 4, 2, 1, block_rows=16),
        1024: DotConfig(128, 128, 4, 4, 1, block_rows=64),
    },
}

# As `MEASURED`, of weights in MXFP4.
MEASURED_E2M1: Mapping[Shape, Mapping[int, DotConfig]] = {
    (32, 4, 5760, 2880): {
        4: DotConfig(128, 128, 4, 4, 1, block_rows=8),
        32: DotConfig(128, 64, 2, 6, 1, block_rows=8),
        64: DotConfig(128, 64, 2, 4, 1, block_rows=16),
        256: DotConfig(128, 64, 4, 3, 1, block_rows=32),
        _ANY: DotConfig(128, 64, 8, 4, 1, block_rows=64),
    },
    (32, 4, 2880, 2880): {
        4: DotConfig(128, 128, 4, 4, 1, block_rows=8),
        8: DotConfig(128, 128, 4, 3, 1, block_rows=16),
        32: DotConfig(128, 64, 2, 8, 1, block_rows=8),
        64: DotConfig(256, 64, 4, 5, 1, block_rows=16),
        256: DotConfig(128, 64, 4, 3, 1, block_rows=32),
        _ANY: DotConfig(128, 64, 8, 4, 1, block_rows=64),
    },
}
