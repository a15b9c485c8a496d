"""Where this user keeps what can be made again."""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["KERNELS", "TILES", "cache_folder", "our_cache_folder"]

TILES = "tiles"  # the folder of what `kernel_autotune` found
KERNELS = "kernels"  # of the lists of kernels that starts compiled


def cache_folder(environment: Mapping[str, str], name: str) -> str:
    """The path of a folder of ours, which need not exist."""
    cache = environment.get("XDG_CACHE_HOME")
    if not cache:
        cache = os.path.join(environment.get("HOME") or os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "ringcore", name)


def our_cache_folder(name: str) -> str:
    """That of the user who runs this process."""
    return cache_folder(os.environ, name)
