"""The search for tiles of a loaded model on its GPU."""

from __future__ import annotations

import torch

from ringcore.config import EngineConfig
from ringcore.distributed.parallel import TensorParallel
from ringcore.protocol.kernel_tuning import KernelTuning
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.loaded_model import LoadedModel
from ringcore.worker.start_up.device_bench import DeviceBench
from ringcore.worker.start_up.profile_run import run_rows
from ringcore.worker.start_up.tile_search import search_tiles

__all__ = ["tune_kernels"]


@torch.inference_mode()
def tune_kernels(config: EngineConfig, loaded: LoadedModel, platform: Platform, tp: TensorParallel) -> KernelTuning:
    """On all ranks together, before the KV cache is allocated. What it takes of memory is given back."""
    assert loaded.tiles is not None, "kernel_autotune is not given"
    step = run_rows(config, loaded.model, loaded.kv_cache_spec(config.cache), platform)
    bench = DeviceBench(platform.device, config.parallel.pipeline_parallel_size)
    try:
        return search_tiles(loaded.tiles, step, bench, config.device.kernel_autotune_timeout_s, tp)
    finally:
        bench.close()
        platform.release_cached()
