"""The platforms, in the order in which device="auto" tries them."""

from __future__ import annotations

from ringcore.errors import ConfigError
from ringcore.worker.platform import Platform
from ringcore.worker.platforms.cpu import CpuPlatform
from ringcore.worker.platforms.cuda import CudaPlatform

__all__ = ["PLATFORMS", "choose_platform"]

PLATFORMS: dict[str, type[CpuPlatform] | type[CudaPlatform]] = {"cuda": CudaPlatform, "cpu": CpuPlatform}


def choose_platform(device: str, rank: int = 0) -> Platform:
    """The platform named by the engine option `device`, or for "auto" the first that is present. Raises `ConfigError`.

    rank: of this worker among those of the host.
    """
    name = next(name for name, kind in PLATFORMS.items() if kind.is_present()) if device == "auto" else device
    if name not in PLATFORMS:
        raise ConfigError(
            f"device={device!r}: no such platform; give auto or one of {', '.join(PLATFORMS)}",
            option="device",
            value=device,
        )
    return CudaPlatform(rank) if name == "cuda" else CpuPlatform()
