"""How many engines a pool keeps, and how deep they sleep, checked before one starts."""

from __future__ import annotations

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError

__all__ = ["checked_keep_and_level"]


def checked_keep_and_level(config: EngineConfig, keep: int, level: int | None) -> tuple[int, int]:
    """(keep, level), with the default. Raises `ConfigError`."""
    can_sleep = config.device.enable_sleep_mode
    if level is None:
        level = 1 if can_sleep else 0
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise ConfigError(f"keep={keep!r}: give an integer of at least 1", option="keep", value=repr(keep))
    if level not in (0, 1, 2):
        raise ConfigError(f"level={level!r}: give 0, 1 or 2", option="level", value=repr(level))
    if level and not can_sleep:
        text = f"level={level}: only an engine with enable_sleep_mode=True can sleep so; give that option, or level=0"
        raise ConfigError(text, option="level", value=level)
    if level == 2 and config.model.files.kind != "safetensors":
        text = f"level=2: weights of {config.model.files.kind} files cannot be read again; give level=1"
        raise ConfigError(text, option="level", value=level)
    return keep, level
