"""What the engine option `deterministic` cannot promise is refused."""

from __future__ import annotations

from ringcore.checkpoint import ModelSpec
from ringcore.config.options import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig
from ringcore.config.value_checks import bad_value
from ringcore.errors import ConfigError

__all__ = ["check_deterministic"]

_BACKENDS = ("auto", "cpu_attn", "triton_rows")  # whose attention is batch-invariant


def check_deterministic(model: ModelConfig, cache: CacheConfig, parallel: ParallelConfig, device: DeviceConfig) -> None:
    """Raises `ConfigError` that names the option that stands against it."""
    if not isinstance(model.deterministic, bool):
        raise bad_value("deterministic", model.deterministic, "give True or False")
    if not model.deterministic:
        return
    if not isinstance(model.spec, ModelSpec):
        reason = f"a {model.spec.architecture} is computed by modules of transformers, whose operations may depend on "
        raise _refused(f"{reason}the batch", "give a model of a native family")
    if model.logits_processors:
        raise _refused("logits_processors compute what they will", "leave them out")
    if cache.is_fp8:
        raise _refused(f"kv_cache_dtype={cache.kv_cache_dtype!r} has no batch-invariant attention", "give 'auto'")
    if cache.host_kv_cache_dir is not None:
        reason = "host_kv_cache_dir may hold keys and values that another engine computed otherwise"
        raise _refused(reason, "leave it out; host_kv_cache_bytes may stay")
    if parallel.redundant_experts is not None:
        raise _refused("redundant_experts move experts to other ranks, whose sums have another order", "leave it out")
    if device.kernel_autotune:
        raise _refused("kernel_autotune chooses tiles by time, and these agree in every bit", "leave it out")
    if device.attention_backend not in _BACKENDS:
        reason = f"attention_backend={device.attention_backend!r} computes a token otherwise in a prompt than decoded"
        raise _refused(reason, f"give one of {', '.join(_BACKENDS)}")


def _refused(reason: str, remedy: str) -> ConfigError:
    return bad_value("deterministic", True, f"{reason}; {remedy}, or deterministic=False")
