"""The engine's options, resolved and validated once, then frozen."""

from ringcore.config.engine_config import EngineConfig
from ringcore.config.options import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig
from ringcore.config.rank_layout import RankLayout

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "ModelConfig",
    "ParallelConfig",
    "RankLayout",
    "SchedulerConfig",
]
