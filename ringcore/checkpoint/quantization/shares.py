"""Whether the packed tensors of a model can be split over ranks: words are not cut; groups may be."""

from __future__ import annotations

from ringcore.checkpoint.expected_tensors import matrices
from ringcore.checkpoint.matrix_tensors import Inputs, Outputs
from ringcore.checkpoint.model_spec import ModelSpec, TransformersSpec

__all__ = ["refused_expert_shares", "refused_shares"]


def refused_shares(spec: ModelSpec, num_ranks: int, expert_parallel: bool = False) -> str | None:
    """Why the model cannot be split over this many ranks, or None. expert_parallel: experts are whole."""
    if spec.quantization is None or num_ranks == 1:
        return None
    for matrix, (num_outputs, num_inputs), _ in matrices(spec):
        if expert_parallel and ".experts." in matrix:
            continue
        form = spec.quantization.format_of(matrix)
        is_row_parallel = matrix.endswith(("o_proj", "down_proj"))
        for tensor in () if form is None else form.tensors:
            for axis in tensor.axes:
                if not isinstance(axis, Inputs if is_row_parallel else Outputs) or axis.is_shared:
                    continue
                share = (
                    num_inputs // num_ranks if is_row_parallel else _outputs_of(spec, matrix, num_outputs, num_ranks)
                )
                if share % axis.per_entry:
                    kind = "inputs" if is_row_parallel else "outputs"
                    return (
                        f"a rank's share of {matrix!r} is {share} {kind}, and its tensor {tensor.suffix!r} packs "
                        f"{axis.per_entry} in a word"
                    )
    return None


def refused_expert_shares(spec: TransformersSpec, num_ranks: int) -> str | None:
    """Why the quantized experts of a model cannot be split over this many ranks, or None. An intermediate size that
    does not divide is whole on every rank."""
    if spec.quantization is None or spec.quantization.experts is None or spec.expert_size % num_ranks:
        return None
    share = spec.expert_size // num_ranks
    for tensor in spec.quantization.experts.tensors:
        for axis in tensor.axes:
            if isinstance(axis, Inputs) and share % axis.per_entry:
                return (
                    f"a rank's share of an expert is {share} of its intermediate size {spec.expert_size}, and the "
                    f"{spec.quantization.method} scales are of {axis.per_entry} each"
                )
    return None


def _outputs_of(spec: ModelSpec, matrix: str, num_outputs: int, num_ranks: int) -> int:
    """With more ranks than KV heads, several have the same one."""
    if matrix.endswith(("k_proj", "v_proj")):
        return max(1, spec.num_kv_heads // num_ranks) * spec.head_dim
    return -(-num_outputs // num_ranks)
