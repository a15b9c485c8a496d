"""Opens a rank's store as the engine's options ask."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.worker.kv_store.connector import KVConnector
from ringcore.worker.kv_store.directory_connector import DirectoryConnector
from ringcore.worker.kv_store.host_blocks import HostBlocks
from ringcore.worker.kv_store.memory_connector import MemoryConnector
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.paged_model import PagedModel

__all__ = ["open_connector"]

_BUFFER_BYTES = 512 << 20  # of host memory between a directory and the device


@torch.inference_mode()
def open_connector(
    config: EngineConfig, rank: int, paged: PagedModel, platform: Platform, namespace: str, num_blocks: int
) -> KVConnector:
    """num_blocks: the most that it holds. namespace: names the model, for a store that outlives the process. Raises
    `CapacityError` or `ConfigError`."""
    link = platform.block_link(paged.block_pages())
    layout = config.parallel.layout
    num_ranks, directory = layout.num_local_ranks(rank), config.cache.host_kv_cache_dir
    if directory is None:
        return MemoryConnector(link, HostBlocks(num_blocks, link, num_ranks))
    backends = " ".join(type(backend).__qualname__ for backend in paged.backends)
    of_layout = blake2b(f"{link.pages.layout}; {backends}".encode(), digest_size=8).hexdigest()
    folder = Path(directory, namespace, f"{of_layout}-{rank}-of-{layout.world_size}")
    num_buffers = min(num_blocks, max(8, _BUFFER_BYTES // link.pages.block_bytes))
    try:
        return DirectoryConnector(folder, link, HostBlocks(num_buffers, link, num_ranks))
    except OSError as error:
        raise ConfigError(
            f"host_kv_cache_dir={directory!r}: {folder} cannot be made: {error.strerror}; give another one",
            option="host_kv_cache_dir",
            value=directory,
        ) from error
