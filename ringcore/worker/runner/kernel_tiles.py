"""Where an engine keeps the tiles that a search on this device found (`kernel_autotune`)."""

from __future__ import annotations

from pathlib import Path

import torch

from ringcore.config.options import DeviceConfig
from ringcore.host.cache_folder import TILES, our_cache_folder
from ringcore.host.measurements import Measurements
from ringcore.kernels.linears.found_tiles import FoundTiles
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.searched_scheme import SearchedTiles

__all__ = ["searched_tiles"]


def searched_tiles(config: DeviceConfig, device: torch.device) -> SearchedTiles | None:
    """None without `kernel_autotune`, and where the device has no kernels."""
    if not config.kernel_autotune or not ops.has_kernels(device):
        return None
    from ringcore.kernels.search.device_facts import device_facts  # with the kernels, which a CPU may not have

    measurements = Measurements(Path(our_cache_folder(TILES)), config.kernel_autotune_timeout_s)
    return SearchedTiles(FoundTiles(measurements, device_facts(device)))
