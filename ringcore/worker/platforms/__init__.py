"""The platforms, in the order in which device="auto" tries them."""

from __future__ import annotations

from ringcore.errors import ConfigError
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.platforms.cuda import CudaPlatform
from ringcore.worker.platforms.platform import Platform

__all__ = ["PLATFORMS", "choose_platform"]

PLATFORMS: dict[str, type[Platform]] = {"cuda": CudaPlatform, "cpu": CpuPlatform}


def choose_platform(
    device: str, rank: int = 0, device_memory: str = "auto", enable_sleep_mode: bool = False
) -> Platform:
    """The platform named by the engine option `device`, or for "auto" the first that is present. Raises `ConfigError`.

    rank: of this worker among those of the host. device_memory, enable_sleep_mode: the engine options.
    """
    name = next(name for name, kind in PLATFORMS.items() if kind.is_present()) if device == "auto" else device
    if name not in PLATFORMS:
        raise ConfigError(
            f"device={device!r}: no such platform; give auto or one of {', '.join(PLATFORMS)}",
            option="device",
            value=device,
        )
    return PLATFORMS[name].open(rank, device_memory, enable_sleep_mode)
