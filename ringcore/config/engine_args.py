"""The engine options as a dataclass, under vLLM's names, for code that passes them around before an engine is made."""

from __future__ import annotations

from dataclasses import MISSING, Field, field, make_dataclass
from functools import wraps
from typing import Any

from ringcore.config.engine_config import EngineConfig
from ringcore.params.vllm_names import ENGINE_OPTIONS, known_options

__all__ = ["AsyncEngineArgs", "EngineArgs"]


class _EngineArgs:
    """Every engine option, by name; vLLM's names that ask for nothing are accepted. `LLM(**asdict(args))` and
    `AsyncEngine.from_engine_args(args)` make an engine. Raises `UnknownOptionError`; values are checked by the engine.
    """

    def create_engine_config(self) -> EngineConfig:
        """Raises `ConfigError` and `ModelLoadError`."""
        return EngineConfig.from_options(**vars(self))


def _made() -> Any:
    """The dataclass of `EngineConfig.options()`, whose constructor knows vLLM's names."""
    own = [(name, option.type, _copy(option)) for name, option in EngineConfig.options().items()]
    names = [name for name, *_ in own]
    namespace = {"__module__": __name__, "__doc__": _EngineArgs.__doc__}
    made: Any = make_dataclass("EngineArgs", own, bases=(_EngineArgs,), namespace=namespace)
    generated = made.__init__

    @wraps(generated)
    def init(self: Any, model: Any, **options: Any) -> None:
        generated(self, model, **known_options(options, names, ENGINE_OPTIONS, "engine option"))

    made.__init__ = init
    return made


def _copy(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return field(default_factory=option.default_factory, metadata=option.metadata)
    return field(default=option.default, metadata=option.metadata)


EngineArgs: Any = _made()
AsyncEngineArgs = EngineArgs  # the options of both are the same here
