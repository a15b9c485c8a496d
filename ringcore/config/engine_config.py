"""The engine configuration: the engine options, resolved and cross-checked once at start-up, then frozen.

`EngineConfig.from_options(model=..., **options)` is the only constructor to use. Each option is a field of exactly one
part; fields below the line `# resolved` are read from the model's files. Values measured at run time are never written
back. No environment variable is read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields, replace
from typing import Any, ClassVar, cast

import msgspec

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.model_files import find_tokenizer
from ringcore.config.deterministic_checks import check_deterministic
from ringcore.config.expert_formats import check_experts
from ringcore.config.gguf_weights import with_gguf_weights
from ringcore.config.option_checks import check_kv_cache_dtype, check_together, check_values
from ringcore.config.options import (
    MAX_GRAPH_TOKENS,
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from ringcore.config.sampling_defaults import read_sampling_defaults
from ringcore.config.speculation import draft_head_of, with_plain_path
from ringcore.config.value_checks import bad_value
from ringcore.families import FAMILIES
from ringcore.host.file_names import as_file_name
from ringcore.host.resources import Host
from ringcore.params.logits_processor import load_logits_processor, logits_processor_name
from ringcore.params.vllm_names import ENGINE_OPTIONS, known_options

__all__ = ["EngineConfig"]

# For None, on a GPU and on other devices; at least a token for each request that may run. On a CPU a token costs the
# same in steps of 512 as in longer ones, and 512 take half a second with a small model: so long may a prompt that
# arrives, and those that decode, wait for another's chunk.
_DEFAULT_TOKEN_BUDGETS = 8192, 512
# On a CPU a prompt that arrives waits for the steps in flight, and this long for another one matters to none. Longer
# steps gain little: what the engine does between them takes half a millisecond.
_SHORT_STEP_S = 0.025
_WITH_PROCESSES = "multiproc", "ray"  # executors whose workers compute while the engine schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    parallel: ParallelConfig
    device: DeviceConfig

    PARTS: ClassVar[Mapping[str, type]] = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "parallel": ParallelConfig,
        "device": DeviceConfig,
    }

    @classmethod
    def options(cls) -> dict[str, Field[Any]]:
        """Every engine option by name; `.default`, `.type` and `.metadata["option"]` (one line) describe it."""
        return {f.name: f for part in cls.PARTS.values() for f in fields(part) if "option" in f.metadata}

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """Resolves and checks the engine options.

        Raises `UnknownOptionError` for a name that is no option, `ConfigError` for a value that cannot work,
        `ModelLoadError` where the model's files are missing, broken or of an unknown architecture.
        """
        known = cls.options()
        options = known_options(options, known, ENGINE_OPTIONS, "engine option")
        options = {name: _default(f) for name, f in known.items()} | options
        options["logits_processors"] = _processor_names(options["logits_processors"])
        options["executor"] = _executor_name(options["executor"])
        check_values(options)
        # Plain strings: the config is sent to other processes.
        for name in ("model", "tokenizer", "admin_keys", "join_keys", "sleep_directory", "host_kv_cache_dir"):
            options[name] = options[name] and as_file_name(os.fspath(options[name]))
        options["speculative"] = with_plain_path(options["speculative"])
        files = find_model(options["model"], options["load_format"])
        if options["tokenizer"] is not None:
            files = msgspec.structs.replace(files, tokenizer_path=str(find_tokenizer(options["tokenizer"])))
        spec = read_model_spec(files, FAMILIES, options["model_impl"], options["quantization"])
        check_experts(spec, options["device"], Host())
        spec = with_gguf_weights(spec, files, options["gguf_weights"], options["dtype"], options["device"], Host())
        head = draft_head_of(options["speculative"], files, spec, FAMILIES)
        defaults = read_sampling_defaults(files) if options["generation_config"] == "auto" else {}
        resolved: dict[type, dict[str, Any]] = {
            ModelConfig: {"files": files, "spec": spec, "sampling_defaults": defaults, "draft_head": head},
            SchedulerConfig: {"num_stages": options["pipeline_parallel_size"]},
        }
        parts: dict[str, Any] = {
            name: part(
                **{f.name: options[f.name] for f in fields(part) if f.name in options},
                **resolved.get(part, {}),
            )
            for name, part in cls.PARTS.items()
        }
        config = cls(**parts)
        check_together(config.model, config.scheduler, config.parallel, config.device)
        check_deterministic(config.model, config.cache, config.parallel, config.device)
        check_kv_cache_dtype(config.cache.kv_cache_dtype, spec, FAMILIES)
        return config if config.device.device == "auto" else config.on_device(config.device.device)

    @property
    def max_mixed_graph_tokens(self) -> int:
        """Of a step with prompts that is a CUDA graph."""
        return min(self.scheduler.token_budget, self.device.max_cudagraph_capture_size or MAX_GRAPH_TOKENS)

    def on_device(self, device: str) -> EngineConfig:
        """Resolves the options whose None depends on the device, "cuda" or "cpu". The workers resolve device "auto"."""
        given, place = self.scheduler, 0 if device == "cuda" else 1
        # Drafts are of tokens that the worker has: a step behind another would be scheduled for the most of them.
        runs_ahead = not place or (self.parallel.executor in _WITH_PROCESSES and given.speculative is None)
        is_short = place and runs_ahead and given.steps_in_flight is None
        scheduler = replace(
            given,
            max_num_batched_tokens=given.max_num_batched_tokens
            or max(_DEFAULT_TOKEN_BUDGETS[place], given.max_num_seqs),
            steps_in_flight=given.steps_in_flight or (2 if runs_ahead else 1),
            short_step_s=_SHORT_STEP_S if is_short else given.short_step_s,
        )
        return self if scheduler == given else replace(self, scheduler=scheduler)


def _default(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return None if option.default is MISSING else option.default


def _processor_names(processors: object) -> list[str]:
    """The names of the processors. Loads each here, since what fails here would fail in the workers."""
    if not isinstance(processors, list | tuple):
        raise bad_value("logits_processors", processors, "give a list of classes, or of their names as 'module:Class'")
    names = [logits_processor_name(processor) for processor in processors]
    for name in names:
        load_logits_processor(name)
    return names


def _executor_name(executor: object) -> str:
    if isinstance(executor, type):
        return f"{executor.__module__}:{executor.__qualname__}"
    return cast(str, executor)
