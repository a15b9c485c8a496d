"""What becomes of quantized experts on the device that is asked for."""

from __future__ import annotations

import msgspec

from ringcore.checkpoint import AnySpec, ModelSpec
from ringcore.checkpoint.expected_tensors import EXPERT_MATRICES, expert_matrix
from ringcore.checkpoint.quantization.expert_formats import has_order
from ringcore.config.value_checks import bad_value
from ringcore.host.resources import Host

__all__ = ["with_experts_of_device"]


def with_experts_of_device(spec: AnySpec, device: str, host: Host) -> AnySpec:
    """device: the engine option. On a GPU `quantization=` leaves experts as they are. Raises `ConfigError` where it has
    no kernels for their format."""
    is_on_gpu = device == "cuda" or (device == "auto" and host.has_gpu())
    if not is_on_gpu or not isinstance(spec, ModelSpec) or spec.experts is None or spec.quantization is None:
        return spec
    found = spec.quantization
    if found.is_on_load:
        return msgspec.structs.replace(
            spec, quantization=msgspec.structs.replace(found, ignored=[*found.ignored, "experts"])
        )
    layers = [layer for layer in range(spec.num_layers) if spec.experts_of(layer) is not None]
    mixtures = (f"model.layers.{layer}.mlp" for layer in layers)
    forms = (found.format_of(expert_matrix(mixture, 0, EXPERT_MATRICES[0])) for mixture in mixtures)
    if any(map(has_order, forms)):
        reason = "a GPU has no kernels for experts in act-order; give device='cpu', or a checkpoint without it"
        raise bad_value("device", device, reason)
    return spec
