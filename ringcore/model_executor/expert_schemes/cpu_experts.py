"""The product of quantized experts on a CPU: by the C kernels on a copy of the codes, else expanded by blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor.expert_schemes.kernel_experts import KernelExperts
from ringcore.model_executor.expert_schemes.padded_inputs import padded_inputs
from ringcore.model_executor.expert_schemes.quantized_experts import QuantizedExperts
from ringcore.model_executor.linear_schemes.block_kernels import block_kernels
from ringcore.model_executor.linear_schemes.cpu_product import is_in_blocks, is_of_rounded_rows
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding
from ringcore.model_executor.linear_schemes.scaled_blocks import padded_order, scaled_blocks
from ringcore.model_executor.weight import Derived

__all__ = ["cpu_experts"]


def cpu_experts(
    matrices: Sequence[QuantizedMatrix], dtype: torch.dtype, updatable: bool, rounding: InputRounding | None
) -> ExpertWeight:
    """matrices: of each expert, of one format and size. dtype: of the inputs. updatable: see `LinearScheme.product`.
    rounding: of the inputs, before the product."""
    found = None if updatable and not is_in_blocks(matrices[0]) else _by_kernels(matrices, dtype, updatable, rounding)
    return found or QuantizedExperts(matrices, len(matrices), dtype, rounding)


def _by_kernels(
    matrices: Sequence[QuantizedMatrix], dtype: torch.dtype, updatable: bool, rounding: InputRounding | None
) -> ExpertWeight | None:
    kernels, num_experts = block_kernels(), len(matrices)
    if kernels is None:
        return None
    orders = [None if one.groups.index is None else one.groups.index.argsort(stable=True) for one in matrices]
    known, padding = [order for order in orders if order is not None], (0, 0)
    if not known:
        order, padding = padded_order(matrices[0])
        orders = [order] * num_experts
    by_integers = rounding is not None and is_of_rounded_rows(matrices[0], rounding)
    derived = Derived() if updatable else None
    blocks = scaled_blocks(kernels, matrices, orders, None, dtype, by_integers=by_integers, derived=derived)
    if blocks is None:
        return None
    all_orders = torch.stack(known) if known else None
    all_derived = [] if derived is None else [*(matrix.derived for matrix in matrices), derived]
    experts = KernelExperts(blocks, num_experts, dtype, None if by_integers else rounding, all_orders, all_derived)
    return padded_inputs(experts, *padding)
