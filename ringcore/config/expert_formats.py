"""Which quantized experts the device that is asked for computes."""

from __future__ import annotations

from ringcore.checkpoint import AnySpec, ModelSpec
from ringcore.checkpoint.expected_tensors import EXPERT_MATRICES, expert_matrix
from ringcore.checkpoint.quantization.expert_formats import has_order
from ringcore.config.value_checks import bad_value
from ringcore.host.resources import Host

__all__ = ["check_experts"]


def check_experts(spec: AnySpec, device: str, host: Host) -> None:
    """device: the engine option. Raises `ConfigError` where it has no kernels for their format."""
    is_on_gpu = device == "cuda" or (device == "auto" and host.has_gpu())
    if not is_on_gpu or not isinstance(spec, ModelSpec) or spec.experts is None or spec.quantization is None:
        return
    layers = [layer for layer in range(spec.num_layers) if spec.experts_of(layer) is not None]
    mixtures = (f"model.layers.{layer}.mlp" for layer in layers)
    forms = (spec.quantization.format_of(expert_matrix(mixture, 0, EXPERT_MATRICES[0])) for mixture in mixtures)
    if any(map(has_order, forms)):
        reason = "a GPU has no kernels for experts in act-order; give device='cpu', or a checkpoint without it"
        raise bad_value("device", device, reason)
