"""Hardware specs (bandwidth, FLOP/s, memory), and the memory that a model leaves for the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from ringcore.checkpoint import ModelSpec
from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.kv_cache.layer_specs import layer_specs
from ringcore.kv_cache.spec import DTYPE_BYTES, KVCacheSpec

__all__ = [
    "HARDWARE",
    "Hardware",
    "ModelSize",
    "find_hardware",
    "kv_cache_spec",
    "memory_table",
    "model_dtype",
    "native_spec",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device. The rates are what large plain copies and GEMMs achieve; a model's kernels achieve the fractions
    `read_efficiency` and `flops_efficiency` of them.
    """

    memory_bytes: int
    read_bytes_per_s: float
    flops_per_s: float  # bfloat16
    link_bytes_per_s: float  # to the other devices of the host, one way
    all_reduce_s: float = 12e-6  # latency of a small all-reduce
    step_s: float = 0.4e-3  # fixed overhead of a step: scheduling, launching, sampling
    read_efficiency: float = 0.85
    flops_efficiency: float = 0.70


# The H200's rates are measured (its data sheet says 4.8 TB/s and 989 TFLOP/s). The others are data sheet values times
# the same ratios, 0.977 and 0.689.
HARDWARE = {
    "h200": Hardware(memory_bytes=141 * 10**9, read_bytes_per_s=4.69e12, flops_per_s=681e12, link_bytes_per_s=450e9),
    "h100": Hardware(memory_bytes=80 * 10**9, read_bytes_per_s=3.27e12, flops_per_s=681e12, link_bytes_per_s=450e9),
    "a100": Hardware(memory_bytes=80 * 10**9, read_bytes_per_s=1.99e12, flops_per_s=215e12, link_bytes_per_s=300e9),
    "l40s": Hardware(memory_bytes=48 * 10**9, read_bytes_per_s=0.844e12, flops_per_s=249e12, link_bytes_per_s=32e9),
}


def find_hardware(name: str) -> Hardware:
    """Raises `ConfigError` for a name that is not in the table."""
    if name not in HARDWARE:
        raise ConfigError(
            f"hardware={name!r}: give one of {', '.join(HARDWARE)}, or fit the costs of a step to measurements",
            option="hardware",
            value=name,
        )
    return HARDWARE[name]


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's parameter counts on each of `ranks` devices. Norms and biases are omitted: they are negligible."""

    layer_params: float  # of all layers together
    active_params: float  # of them those by which a token is multiplied: of a mixture its own experts
    head_params: float  # of the language-model head
    embedding_params: float  # 0 where they are the head's
    dtype_bytes: int

    @classmethod
    def of(cls, spec: ModelSpec, dtype: str, ranks: int) -> ModelSize:
        attention = spec.hidden_size * spec.head_dim * 2 * (spec.num_heads + max(spec.num_kv_heads, ranks))
        mlps = active = 0
        for layer in range(spec.num_layers):
            experts = spec.experts_of(layer)
            width = spec.intermediate_size if experts is None else experts.intermediate_size
            mlps += 3 * spec.hidden_size * width * (1 if experts is None else experts.num_experts)
            active += 3 * spec.hidden_size * width * (1 if experts is None else experts.num_experts_per_tok)
        vocabulary = spec.vocab_size * spec.hidden_size
        return cls(
            (spec.num_layers * attention + mlps) / ranks,
            (spec.num_layers * attention + active) / ranks,
            vocabulary / ranks,
            0.0 if spec.tie_word_embeddings else vocabulary / ranks,
            DTYPE_BYTES[dtype],
        )

    @property
    def weights_bytes(self) -> int:
        return int((self.layer_params + self.head_params + self.embedding_params) * self.dtype_bytes)


def native_spec(config: EngineConfig) -> ModelSpec:
    """The sizes of the model's layers. Raises `ConfigError` for a model that only transformers knows."""
    spec = config.model.spec
    if isinstance(spec, ModelSpec):
        return spec
    raise ConfigError(
        f"model={config.model.model!r}: the sizes of a {spec.architecture} are known to transformers alone, and a "
        "simulation builds no model; give a model of the same size that has a native class",
        option="model",
        value=config.model.model,
    )


def model_dtype(config: EngineConfig) -> str:
    """The dtype to compute in: the option's, or the checkpoint's."""
    return config.model.spec.dtype if config.model.dtype == "auto" else config.model.dtype


def kv_cache_spec(config: EngineConfig) -> dict[str, KVCacheSpec]:
    """The KV cache spec of each attention layer on one rank, by layer name."""
    ranks = config.parallel.tensor_parallel_size
    cache = config.cache
    return layer_specs(native_spec(config), ranks, cache.block_size, model_dtype(config), cache.is_fp8)


def memory_table(config: EngineConfig, hardware: Hardware) -> dict[str, int]:
    """The memory table of one rank in bytes, like a worker's: `available_kv_cache_bytes` is the KV cache's budget.

    Capped at the useful size: twice the KV cache of max_num_seqs requests of maximum length, once for the running
    requests and once for cached prefixes.
    """
    spec, dtype = native_spec(config), model_dtype(config)
    weights = ModelSize.of(spec, dtype, config.parallel.tensor_parallel_size).weights_bytes
    wide = max(4 * spec.hidden_size, 3 * spec.intermediate_size // config.parallel.tensor_parallel_size)
    activations = config.scheduler.token_budget * (4 * spec.hidden_size + wide) * DTYPE_BYTES[dtype]
    table = {"total_bytes": hardware.memory_bytes, "weights_bytes": weights, "activations_bytes": activations}
    if config.cache.kv_cache_bytes is not None:
        return table | {"available_kv_cache_bytes": config.cache.kv_cache_bytes}
    budget = int(hardware.memory_bytes * (config.cache.gpu_memory_utilization or 0.9))
    available = max(0, budget - weights - activations)
    return table | {"budget_bytes": budget, "available_kv_cache_bytes": min(available, _useful_bytes(config))}


def _useful_bytes(config: EngineConfig) -> int:
    specs = list(kv_cache_spec(config).values())
    num_blocks = -(-config.model.context_len // config.cache.block_size)
    return (2 * config.scheduler.max_num_seqs * num_blocks + 1) * sum(spec.page_size_bytes for spec in specs)
