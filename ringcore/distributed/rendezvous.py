"""How the ranks of a group find each other: by a file in which several groups may meet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

__all__ = ["TIMEOUT", "gloo_options", "group_store"]

# Ranks execute the same steps at the same time, or one after the other, so a message waits at most for another rank's
# share of a step; and a dead rank is detected at once by its closed connection. The timeout covers all other hangs.
TIMEOUT = timedelta(seconds=300)


def group_store(rendezvous: str, name: str, timeout: timedelta) -> PrefixStore:
    """The keys of the group `name` in the file `rendezvous`, which nothing removes."""
    store = FileStore(rendezvous)
    store.set_timeout(timeout)
    return PrefixStore(name, store)


def gloo_options(timeout: timedelta) -> Any:
    """Of a group over the loopback interface."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = timeout
    return options
