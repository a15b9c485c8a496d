"""Whether a model can be split over so many ranks."""

from __future__ import annotations

from ringcore.checkpoint import AnySpec, ModelSpec
from ringcore.checkpoint.quantization.shares import refused_shares
from ringcore.config.value_checks import bad_value

__all__ = ["check_experts", "check_split"]


def check_experts(spec: AnySpec, size: int, redundant: int | None) -> None:
    """That each rank can have whole experts. Of a model of transformers the worker that builds it says it where the
    configuration has the number by another name."""
    if isinstance(spec, ModelSpec) and not spec.num_experts:
        raise bad_value("expert_parallel", True, f"a {spec.architecture} has no experts; leave it out")
    most = spec.num_experts * (size - 1)
    if spec.num_experts and redundant is not None and redundant > most:
        reason = (
            f"a rank has an expert once, so {size} ranks have at most {most} replicas of {spec.num_experts} experts"
        )
        raise bad_value("redundant_experts", redundant, f"{reason}; lower it")
    if redundant and spec.num_experts and (spec.num_experts + redundant) % size:
        reason = f"with its {spec.num_experts} experts they do not divide over tensor_parallel_size={size}"
        fitting = -spec.num_experts % size
        raise bad_value("redundant_experts", redundant, f"{reason}; give {fitting} or that and a multiple of {size}")
    if not redundant and spec.num_experts % size:
        reason = f"its {spec.num_experts} experts do not divide over tensor_parallel_size={size}"
        raise bad_value("expert_parallel", True, f"{reason}; leave it out, or change that, or give redundant_experts")


def check_split(spec: ModelSpec, size: int, expert_parallel: bool) -> None:
    experts = spec.experts
    if experts is not None and not expert_parallel and experts.intermediate_size % size:
        raise bad_value(
            "tensor_parallel_size",
            size,
            f"the intermediate size {experts.intermediate_size} of an expert does not divide into {size} ranks; "
            "give expert_parallel=True, by which each rank has whole experts, or another number",
        )
    if spec.num_heads % size:
        divisors = [n for n in range(1, spec.num_heads + 1) if _divides(spec, n)]
        raise bad_value(
            "tensor_parallel_size",
            size,
            f"{spec.num_heads} attention heads do not divide into {size} ranks; give one of {divisors}",
        )
    if not _divides(spec, size):
        raise bad_value(
            "tensor_parallel_size",
            size,
            f"{spec.num_kv_heads} KV heads and an intermediate size of {spec.intermediate_size} "
            f"cannot be split or replicated evenly over {size} ranks",
        )
    refused = refused_shares(spec, size, expert_parallel)
    if refused is not None:
        raise bad_value("tensor_parallel_size", size, f"{refused}; lower it")


def _divides(spec: ModelSpec, size: int) -> bool:
    """Whether `size` ranks can share a layer: KV heads are split, or replicated where there are more ranks."""
    kv_ok = spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0
    has_mlp = any(spec.experts_of(layer) is None for layer in range(spec.num_layers))
    return spec.num_heads % size == 0 and kv_ok and (not has_mlp or spec.intermediate_size % size == 0)
