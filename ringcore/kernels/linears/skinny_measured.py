"""The fastest tiles of the linears of published models, as measured: a cache of what `skinny_configs` would look for.

On H200s, in CUDA graphs of dependent nodes, weights from memory, results added to float32 where the layer adds. The
first three models' are the best of whole passes, the others those of single linears, after a norm where the layer has
one (`python -m benchmarks gpu_linears`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ringcore.kernels.linears.skinny_tiles import Config, DotConfig, FmaConfig

__all__ = ["MEASURED"]

Shape = tuple[int, int, bool]  # num_outputs, num_inputs, is_gated: a gated weight has twice as many rows

# Of a shape: by the largest number of rows, and for all from the one before it on. None: cuBLAS.
MEASURED: Mapping[Shape, Mapping[int, Config | None]] = {
    # Qwen3-0.6B: qkv, o, gate_up, down, head
    (4096, 1024, False): {
        1: FmaConfig(2, 1024, 4),
        4: DotConfig(64, 256, 4, 3, 1),
        16: DotConfig(64, 256, 4, 3, 2),
        32: DotConfig(64, 256, 4, 3, 1),
        64: DotConfig(64, 128, 4, 3, 1),
        256: DotConfig(64, 128, 4, 3, 1, block_rows=128),
    },
    (1024, 2048, False): {1: FmaConfig(2, 2048, 4), 4: FmaConfig(2, 2048, 4, trigger_late=True)},
    (3072, 1024, True): {
        1: FmaConfig(8, 1024, 2),
        32: DotConfig(64, 256, 4, 3, 1),
        64: DotConfig(128, 64, 8, 4, 1),
        128: DotConfig(64, 128, 4, 3, 1, block_rows=128),
        256: DotConfig(128, 64, 8, 4, 1, block_rows=128),
    },
    (1024, 3072, False): {1: FmaConfig(2, 4096, 4), 4: FmaConfig(2, 2048, 4, trigger_late=True)},
    (151936, 1024, False): {1: FmaConfig(4, 1024, 2)},
    # Llama-3.2-1B
    (3072, 2048, False): {1: FmaConfig(4, 1024, 2)},
    (2048, 2048, False): {1: FmaConfig(2, 2048, 4)},
    (8192, 2048, True): {1: FmaConfig(2, 1024, 4)},
    (2048, 8192, False): {1: FmaConfig(4, 2048, 2)},
    (128256, 2048, False): {1: FmaConfig(2, 2048, 4)},
    # Qwen3-8B
    (6144, 4096, False): {1: FmaConfig(4, 4096, 4)},
    (12288, 4096, True): {1: FmaConfig(1, 4096, 8), 32: DotConfig(64, 128, 4, 3, 1, prefetched_inputs=0)},
    (4096, 12288, False): {1: FmaConfig(4, 2048, 8)},
    (151936, 4096, False): {1: FmaConfig(2, 4096, 8)},
    # Qwen3-8B, one of two ranks
    (3072, 4096, False): {1: FmaConfig(4, 2048, 8)},
    (4096, 2048, False): {1: FmaConfig(8, 2048, 2)},
    (6144, 4096, True): {1: FmaConfig(2, 4096, 4)},
    (4096, 6144, False): {1: FmaConfig(1, 4096, 8)},
    (75968, 4096, False): {1: FmaConfig(4, 4096, 8)},
    # Qwen3-4B, Llama-3.2-3B, OLMo-2-7B, Phi-4, GLM-4-9B
    (6144, 2560, False): {
        1: FmaConfig(4, 2048, 4, trigger_late=True),
        32: DotConfig(64, 256, 4, 3, 1),
        64: DotConfig(64, 128, 4, 4, 1, prefetched_inputs=0),
    },
    (2560, 4096, False): {
        1: FmaConfig(2, 1024, 2, trigger_late=True),
        32: DotConfig(64, 256, 4, 3, 3, prefetched_inputs=0),
    },
    (9728, 2560, True): {
        1: FmaConfig(1, 4096, 4),
        32: DotConfig(64, 64, 4, 4, 1, prefetched_inputs=0),
        64: DotConfig(64, 64, 4, 4, 1, prefetched_inputs=0),
    },
    (2560, 9728, False): {1: FmaConfig(2, 2048, 2), 32: DotConfig(64, 256, 4, 3, 3)},
    (151936, 2560, False): {
        1: FmaConfig(2, 2048, 4, trigger_late=True),
        32: DotConfig(64, 128, 4, 4, 1, prefetched_inputs=0),
        64: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0),
    },
    (5120, 3072, False): {1: FmaConfig(2, 2048, 2), 32: None},
    (3072, 3072, False): {1: FmaConfig(4, 1024, 4), 32: DotConfig(64, 128, 4, 3, 4)},
    (8192, 3072, True): {
        1: FmaConfig(2, 2048, 4),
        32: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0),
        64: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0),
    },
    (3072, 8192, False): {
        1: FmaConfig(2, 2048, 2, trigger_late=True),
        32: DotConfig(64, 128, 4, 3, 4, prefetched_inputs=0),
    },
    (128256, 3072, False): {
        1: FmaConfig(1, 2048, 4),
        32: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0),
        64: DotConfig(128, 64, 8, 4, 1, prefetched_inputs=0),
    },
    (12288, 4096, False): {1: FmaConfig(4, 2048, 8), 32: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0)},
    (4096, 4096, False): {1: FmaConfig(2, 2048, 8), 32: DotConfig(64, 256, 4, 3, 2, prefetched_inputs=0)},
    (11008, 4096, True): {
        1: FmaConfig(2, 1024, 2),
        32: DotConfig(64, 128, 4, 3, 1, prefetched_inputs=0),
        64: DotConfig(128, 64, 4, 4, 1),
    },
    (4096, 11008, False): {1: FmaConfig(2, 512, 2), 32: DotConfig(64, 256, 4, 3, 2)},
    (100352, 4096, False): {
        1: FmaConfig(2, 2048, 4),
        32: DotConfig(64, 128, 4, 4, 1, prefetched_inputs=0),
        64: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0),
    },
    (7680, 5120, False): {1: FmaConfig(2, 4096, 4), 32: DotConfig(64, 256, 4, 3, 1, prefetched_inputs=0)},
    (5120, 5120, False): {1: FmaConfig(4, 1024, 2, trigger_late=True), 32: None},
    (17920, 5120, True): {1: FmaConfig(1, 4096, 4), 32: DotConfig(64, 128, 4, 3, 1, prefetched_inputs=0), 64: None},
    (5120, 17920, False): {1: FmaConfig(2, 1024, 4), 32: DotConfig(64, 64, 4, 4, 4, prefetched_inputs=0)},
    (100352, 5120, False): {
        1: FmaConfig(4, 512, 1, trigger_late=True),
        32: DotConfig(128, 128, 8, 4, 1),
        64: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0),
    },
    (4608, 4096, False): {1: FmaConfig(4, 2048, 8), 32: DotConfig(128, 128, 8, 4, 3, prefetched_inputs=0)},
    (13696, 4096, True): {
        1: FmaConfig(2, 2048, 8),
        32: DotConfig(64, 128, 4, 4, 1, prefetched_inputs=0),
        64: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0),
    },
    (4096, 13696, False): {1: FmaConfig(2, 512, 2), 32: DotConfig(64, 128, 4, 4, 4)},
    (151552, 4096, False): {
        1: FmaConfig(4, 1024, 2),
        32: DotConfig(128, 128, 8, 4, 1, prefetched_inputs=0),
        64: DotConfig(128, 128, 4, 4, 1, prefetched_inputs=0),
    },
    # Qwen3-30B-A3B: qkv, o, head
    (5120, 2048, False): {1: FmaConfig(4, 2048, 8), 32: DotConfig(64, 256, 4, 4, 1, prefetched_inputs=0)},
    (2048, 4096, False): {1: FmaConfig(2, 2048, 4)},
    (151936, 2048, False): {1: FmaConfig(4, 1024, 4)},
}
