"""The platforms, in the order in which device="auto" tries them."""

from __future__ import annotations

from ringcore.errors import ConfigError
from ringcore.worker.platform import Platform
from ringcore.worker.platforms.cpu import CpuPlatform

__all__ = ["PLATFORMS", "choose_platform"]

PLATFORMS: dict[str, type[Platform]] = {"cpu": CpuPlatform}


def choose_platform(device: str) -> Platform:
    """The platform named by the engine option `device`, or for "auto" the first. Raises `ConfigError`."""
    name = next(iter(PLATFORMS)) if device == "auto" else device
    if name not in PLATFORMS:
        raise ConfigError(
            f"device={device!r}: no such platform; give auto or one of {', '.join(PLATFORMS)}",
            option="device",
            value=device,
        )
    return PLATFORMS[name]()
