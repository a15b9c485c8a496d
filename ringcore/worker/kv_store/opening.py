"""Opens a rank's store as the engine's options ask."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import torch

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.worker.kv_store.block_files import BlockFiles
from ringcore.worker.kv_store.connector import KVConnector
from ringcore.worker.kv_store.directory_connector import DirectoryConnector
from ringcore.worker.kv_store.directory_limit import DirectoryLimit
from ringcore.worker.kv_store.host_blocks import HostBlocks
from ringcore.worker.kv_store.memory_connector import MemoryConnector
from ringcore.worker.platforms.platform import Platform
from ringcore.worker.runner.paged_model import PagedModel

__all__ = ["open_connector"]


@torch.inference_mode()
def open_connector(
    config: EngineConfig, rank: int, paged: PagedModel, platform: Platform, namespace: str, num_blocks: int
) -> KVConnector:
    """num_blocks: in host memory. namespace: names the model, for a store that outlives the process. Raises
    `CapacityError` or `ConfigError`."""
    link, cache, layout = platform.block_link(paged.block_pages()), config.cache, config.parallel.layout
    places = HostBlocks(num_blocks, link, layout.num_local_ranks(rank))
    if cache.host_kv_cache_dir is None:
        return MemoryConnector(link, places)
    backends = " ".join(type(backend).__qualname__ for backend in paged.backends)
    of_layout = blake2b(f"{link.pages.layout}; {backends}".encode(), digest_size=8).hexdigest()
    folder = Path(cache.host_kv_cache_dir, namespace, f"{of_layout}-{rank}-of-{layout.world_size}")
    limit_bytes, timeout_s = cache.directory_bytes(layout.world_size), cache.host_kv_cache_dir_timeout_s
    limit = DirectoryLimit(Path(cache.host_kv_cache_dir), limit_bytes, layout.world_size)
    try:
        files = BlockFiles(folder, link.pages.block_bytes, limit, timeout_s)
    except OSError as error:
        places.close()
        raise ConfigError(
            f"host_kv_cache_dir={cache.host_kv_cache_dir!r}: {folder} cannot be used: {error.strerror}; give another "
            "one",
            option="host_kv_cache_dir",
            value=cache.host_kv_cache_dir,
        ) from error
    return DirectoryConnector(link, places, files, timeout_s)
