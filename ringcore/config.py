"""What is known before start: the engine options, resolved and cross-checked once, then frozen.

`EngineConfig.from_options(model=..., **options)` is the one door. Each option is a field of exactly one part;
fields below the line `# resolved` are facts read from the model's files. What is measured at run time is never
written back here. No environment variable is read.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, cast

import msgspec

from ringcore.admin_keys import check_endpoint, read_server_keys
from ringcore.checkpoint import ModelFiles, ModelSpec, find_model, read_model_spec
from ringcore.checkpoint.model_files import find_tokenizer
from ringcore.errors import ConfigError, unknown_option
from ringcore.field_checks import MAX_TIMEOUT_S, is_timeout
from ringcore.file_names import as_file_name
from ringcore.logits_processor import load_logits_processor, logits_processor_name
from ringcore.registry import MODELS

__all__ = ["CacheConfig", "DeviceConfig", "EngineConfig", "ModelConfig", "ParallelConfig", "SchedulerConfig"]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULING_POLICIES = ("fcfs", "priority")
EXECUTORS = ("multiproc", "uniproc")
ATTENTION_BACKENDS = ("auto", "triton", "flash_attn", "torch_sdpa")
DEVICE_MEMORY = ("auto", "arena", "plain")
STRUCTURED_OUTPUTS_BACKENDS = ("auto", "llguidance", "xgrammar")
MIN_RING_BYTES, MAX_RING_BYTES = 64 << 10, 1 << 30
_TOKENS_A_STEP = {"cuda": 8192, "cpu": 2048}  # by device, where the user does not say
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "load_format": LOAD_FORMATS,
    "dtype": DTYPES,
    "device": DEVICES,
    "scheduling_policy": SCHEDULING_POLICIES,
    "attention_backend": ATTENTION_BACKENDS,
    "device_memory": DEVICE_MEMORY,
    "structured_outputs_backend": STRUCTURED_OUTPUTS_BACKENDS,
}


def _option(default: Any, doc: str) -> Any:
    if isinstance(default, list):  # each gets its own
        return field(default_factory=default.copy, metadata={"option": doc})
    return field(default=default, metadata={"option": doc})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = _option("", "a model folder, a .gguf file, or a hub id")
    tokenizer: str | None = _option(None, "a folder or file with the tokenizer; None means the model's own")
    dtype: str = _option("auto", f"one of {', '.join(DTYPES)}; auto is the checkpoint's where the device is fast at it")
    load_format: str = _option("auto", f"one of {', '.join(LOAD_FORMATS)}; dummy makes random weights")
    max_model_len: int | Literal["auto"] | None = _option(
        None, "prompt and completion together, in tokens; None means the model's own, auto as much of it as fits"
    )
    seed: int = _option(0, "seeds dummy weights and the seeds of requests that bring none")
    tokenizer_timeout_s: float = _option(10.0, "a prompt whose chat template and tokenizer take longer is refused")
    max_tokenizer_queue: int = _option(1024, "prompts that may wait for the tokenizer; further ones are refused")
    logits_processors: list[str] = _option([], "'module:Class' of each custom LogitsProcessor, or the class itself")
    # resolved
    files: ModelFiles
    spec: ModelSpec

    @property
    def context_len(self) -> int:
        """`max_model_len`, or the model's own. Of "auto" the upper bound; what fits, the start-up finds."""
        return self.max_model_len if isinstance(self.max_model_len, int) else self.spec.max_position_embeddings


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    block_size: int = _option(16, "tokens in a block of the KV cache")
    num_blocks_override: int | None = _option(None, "this many blocks whatever the memory, the null block among them")
    kv_cache_bytes: int | None = _option(None, "bytes of the KV cache on each rank; None measures what is free")
    gpu_memory_utilization: float | None = _option(
        None,
        "the share of the device's memory to use; None means 0.9, and on a CPU 0.75 of what the weights leave",
    )
    enable_prefix_caching: bool = _option(True, "keep full blocks of finished requests for prompts that begin alike")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_num_seqs: int = _option(256, "requests that run at once")
    max_num_batched_tokens: int | None = _option(
        None, "tokens computed in one step, prompts and completions together; None means 8192 on a GPU, 2048 on a CPU"
    )
    long_prefill_token_threshold: int | None = _option(None, "the most tokens of one prompt in one step")
    scheduling_policy: str = _option("fcfs", f"one of {', '.join(SCHEDULING_POLICIES)}; a lower priority goes first")
    preempt_lower_priority: bool = _option(False, "make room for a waiting request by preempting running lower ones")
    max_skip_ahead: int = _option(16, "how many later requests may start before one that waits for blocks")
    max_logprobs: int = _option(20, "the most logprobs and prompt_logprobs a request may ask for; -1 is no bound")
    steps_in_flight: int = _option(2, "1, or 2 to schedule a step before the tokens of the one before it are known")
    structured_outputs_backend: Literal["auto", "llguidance", "xgrammar"] = _option(
        "auto", f"one of {', '.join(STRUCTURED_OUTPUTS_BACKENDS)}; auto is llguidance where it is installed"
    )
    structured_outputs_timeout_s: float = _option(10.0, "a grammar that takes longer to compile is refused")

    @property
    def token_budget(self) -> int:
        """`max_num_batched_tokens` once the device is known: see `EngineConfig.on_device`."""
        assert self.max_num_batched_tokens is not None, "the device is not known yet"
        return self.max_num_batched_tokens

    @property
    def max_tokens_in_flight(self) -> int:
        """The most tokens of one request that are scheduled and not confirmed; once the device is known."""
        return self.steps_in_flight * min(self.token_budget, self.long_prefill_token_threshold or self.token_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    tensor_parallel_size: int = _option(1, "workers that share each layer")
    executor: str = _option("multiproc", "multiproc, uniproc, or an Executor class (or its 'module:Class')")
    worker_extension: str | None = _option(None, "'module.Class' mixed into the worker; its @rpc methods can be called")
    allow_callables: bool = _option(False, "let collective_rpc take Python functions from the client (by cloudpickle)")
    max_worker_restarts: int = _option(0, "how often workers that died are replaced, and their requests computed again")
    step_timeout_s: float | None = _option(300.0, "a step that takes longer ends its workers; None means never")
    engine_timeout_s: float | None = _option(
        60.0, "an engine process that stands still for longer, or a worker that is stopped, is ended; None means never"
    )
    stall_warning_s: float = _option(30.0, "a step or call older than this is diagnosed in the log")
    call_ring_bytes: int = _option(64 << 20, "shared memory of the ring to the workers; larger messages go beside it")
    reply_ring_bytes: int = _option(8 << 20, "shared memory of the ring back from each worker")
    admin_endpoint: str | None = _option(None, "tcp://HOST:PORT where AdminClients may call workers; port 0 picks one")
    admin_keys: str | None = _option(None, "the directory with the keys of admin_endpoint, by 'ringcore keys DIR'")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    device: str = _option("auto", f"one of {', '.join(DEVICES)}")
    attention_backend: str = _option("auto", f"one of {', '.join(ATTENTION_BACKENDS)}")
    enforce_eager: bool = _option(False, "launch kernels one by one, and capture no CUDA graphs")
    device_memory: str = _option(
        "auto",
        f"one of {', '.join(DEVICE_MEMORY)}: weights and KV cache in arenas of CUDA virtual memory, or by torch's own "
        "allocator; auto is arenas where they can be had",
    )
    enable_sleep_mode: bool = _option(False, "keep weights and KV cache in arenas, whose memory sleep() gives back")
    sleep_directory: str | None = _option(
        None, "where sleep() keeps the weights in an unnamed file; None means host memory"
    )


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
        for name in options:
            if name not in known:
                raise unknown_option(name, known, "engine option")
        options = {name: _default(f) for name, f in known.items()} | options
        options["logits_processors"] = _processor_names(options["logits_processors"])
        options["executor"] = _executor_name(options["executor"])
        _check_values(options)
        # Plain strings: the config travels to other processes.
        for name in ("model", "tokenizer", "admin_keys", "sleep_directory"):
            options[name] = options[name] and as_file_name(os.fspath(options[name]))
        files = find_model(options["model"], options["load_format"])
        if options["tokenizer"] is not None:
            files = msgspec.structs.replace(files, tokenizer_path=str(find_tokenizer(options["tokenizer"])))
        spec = read_model_spec(files, MODELS)
        parts: dict[str, Any] = {
            name: part(
                **{f.name: options[f.name] for f in fields(part) if f.name in options},
                **({"files": files, "spec": spec} if part is ModelConfig else {}),
            )
            for name, part in cls.PARTS.items()
        }
        config = cls(**parts)
        _check_together(config)
        return config if config.device.device == "auto" else config.on_device(config.device.device)

    def on_device(self, device: str) -> EngineConfig:
        """With numbers where None leaves them to the device, "cuda" or "cpu". Which one "auto" is, the workers find."""
        if self.scheduler.max_num_batched_tokens is not None:
            return self
        return replace(self, scheduler=replace(self.scheduler, max_num_batched_tokens=_TOKENS_A_STEP[device]))


def _default(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return None if option.default is MISSING else option.default


def _processor_names(processors: object) -> list[str]:
    """Each can be loaded here, and so in the workers."""
    if not isinstance(processors, list | tuple):
        raise _bad("logits_processors", processors, "give a list of classes, or of their names as 'module:Class'")
    names = [logits_processor_name(processor) for processor in processors]
    for name in names:
        load_logits_processor(name)
    return names


def _executor_name(executor: object) -> str:
    if isinstance(executor, type):
        return f"{executor.__module__}:{executor.__qualname__}"
    return cast(str, executor)


def _bad(option: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{option}={value!r}: {remedy}", option=option, value=repr(value))


def _check_values(options: Mapping[str, Any]) -> None:
    """Each option alone."""
    if not isinstance(options["model"], str | os.PathLike) or not str(options["model"]):
        raise _bad("model", options["model"], "give a model folder, a .gguf file, or a hub id")
    for name, choices in _CHOICES.items():
        if options[name] not in choices:
            raise _bad(name, options[name], f"give one of {', '.join(choices)}")
    executor = options["executor"]
    if not isinstance(executor, str) or (executor not in EXECUTORS and ":" not in executor):
        raise _bad("executor", executor, f"give one of {', '.join(EXECUTORS)}, an Executor class, or 'module:Class'")
    for name in ("block_size", "max_num_seqs", "tensor_parallel_size", "max_tokenizer_queue"):
        _check_count(name, options[name], 1)
    for name in ("kv_cache_bytes", "max_num_batched_tokens", "long_prefill_token_threshold"):
        if options[name] is not None:
            _check_count(name, options[name], 1)
    if options["max_model_len"] not in (None, "auto"):
        _check_count("max_model_len", options["max_model_len"], 1, or_else="'auto'")
    if options["num_blocks_override"] is not None:
        _check_count("num_blocks_override", options["num_blocks_override"], 2)
    if options["steps_in_flight"] not in (1, 2):
        raise _bad("steps_in_flight", options["steps_in_flight"], "give 1 or 2")
    for name in ("max_worker_restarts", "max_skip_ahead"):
        _check_count(name, options[name], 0)
    if options["max_logprobs"] != -1 or isinstance(options["max_logprobs"], bool):
        _check_count("max_logprobs", options["max_logprobs"], 0, 2**31 - 1, or_else="-1 for no bound")
    for name in ("call_ring_bytes", "reply_ring_bytes"):
        _check_count(name, options[name], MIN_RING_BYTES, MAX_RING_BYTES)
    for name in ("stall_warning_s", "structured_outputs_timeout_s", "tokenizer_timeout_s"):
        _check_seconds(name, options[name])
    for name in ("step_timeout_s", "engine_timeout_s"):
        if options[name] is not None:
            _check_seconds(name, options[name])
    for name in (
        "allow_callables",
        "enable_prefix_caching",
        "preempt_lower_priority",
        "enforce_eager",
        "enable_sleep_mode",
    ):
        if not isinstance(options[name], bool):
            raise _bad(name, options[name], "give True or False")
    share = options["gpu_memory_utilization"]
    if share is not None and not (isinstance(share, int | float) and 0 < share <= 1):
        raise _bad("gpu_memory_utilization", share, "give a number above 0 and at most 1")
    _check_sleep(options["enable_sleep_mode"], options["sleep_directory"], options["device_memory"])
    _check_admin(options["admin_endpoint"], options["admin_keys"])
    _check_installed("structured_outputs_backend", options["structured_outputs_backend"])


def _check_installed(option: str, library: str) -> None:
    if library == "auto" or importlib.util.find_spec(library) is not None:
        return
    extra = {"llguidance": "structured", "xgrammar": "xgrammar"}[library]
    raise _bad(option, library, f"it is not installed; run pip install 'ringcore[{extra}]', or give 'auto'")


def _check_sleep(is_enabled: bool, directory: Any, device_memory: str) -> None:
    if is_enabled and device_memory == "plain":
        raise _bad("enable_sleep_mode", True, "device_memory='plain' has no arenas, which it needs; give 'auto'")
    if directory is None:
        return
    if not isinstance(directory, str | os.PathLike) or not os.path.isdir(directory):
        raise _bad("sleep_directory", directory, "give a directory that is there, with room for the weights")
    if not is_enabled:
        raise _bad("sleep_directory", directory, "it is for sleep mode; give enable_sleep_mode=True too, or neither")


def _check_admin(endpoint: object, keys: Any) -> None:
    """An endpoint on the network and its keys go together, and the keys are such that they protect it."""
    if endpoint is None and keys is None:
        return
    if endpoint is None:
        raise _bad("admin_keys", keys, "they are for the admin endpoint; give admin_endpoint too, or neither")
    check_endpoint("admin_endpoint", endpoint, to_listen=True)
    if keys is None:
        raise _bad("admin_endpoint", endpoint, "give admin_keys too, a directory made by 'ringcore keys DIR'")
    if not isinstance(keys, str | os.PathLike) or not os.fspath(keys):
        raise _bad("admin_keys", keys, "give a directory made by 'ringcore keys DIR'")
    read_server_keys(keys)


def _check_count(name: str, value: object, low: int, high: int | None = None, or_else: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise _bad(name, value, f"give an integer of at least {low}" + (f", or {or_else}" if or_else else ""))
    if high is not None and value > high:
        raise _bad(name, value, f"give an integer of at most {high}")


def _check_seconds(name: str, value: object) -> None:
    if not is_timeout(value) or not value:
        raise _bad(name, value, f"give a positive number of seconds, at most {MAX_TIMEOUT_S:.0f}")


def _check_together(config: EngineConfig) -> None:
    """The options with each other and with the model."""
    spec, size = config.model.spec, config.parallel.tensor_parallel_size
    limit = spec.max_position_embeddings
    if config.model.context_len > limit:
        raise _bad("max_model_len", config.model.max_model_len, f"the model has positions for {limit} tokens; lower it")
    if config.scheduler.preempt_lower_priority and config.scheduler.scheduling_policy != "priority":
        raise _bad(
            "preempt_lower_priority",
            True,
            f"scheduling_policy={config.scheduler.scheduling_policy!r} knows no priorities; "
            "give scheduling_policy='priority' too, or leave this out",
        )
    if config.parallel.executor == "uniproc" and size != 1:
        raise _bad("tensor_parallel_size", size, "the uniproc executor has one worker; use executor='multiproc'")
    if spec.num_heads % size:
        divisors = [n for n in range(1, spec.num_heads + 1) if _divides(spec, n)]
        raise _bad(
            "tensor_parallel_size",
            size,
            f"{spec.num_heads} attention heads do not divide into {size} ranks; give one of {divisors}",
        )
    if not _divides(spec, size):
        raise _bad(
            "tensor_parallel_size",
            size,
            f"{spec.num_kv_heads} KV heads and an intermediate size of {spec.intermediate_size} "
            f"cannot be split or replicated evenly over {size} ranks",
        )


def _divides(spec: ModelSpec, size: int) -> bool:
    """Whether `size` ranks can share a layer: KV heads are split, or replicated where there are more ranks."""
    kv_ok = spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0
    return spec.num_heads % size == 0 and kv_ok and spec.intermediate_size % size == 0
