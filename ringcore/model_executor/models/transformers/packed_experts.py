"""Experts that stay in the blocks of a GGUF file: rows of whole blocks, of which a rank's share may be a part."""

from __future__ import annotations

from dataclasses import replace

from ringcore.checkpoint.gguf_library_names import without_expert
from ringcore.checkpoint.quantization import GgufFormat, Quantization
from ringcore.model_executor.expert_schemes.gguf_experts import GgufExpertsScheme
from ringcore.model_executor.linear_schemes.block_kernels import LANES
from ringcore.model_executor.models.transformers.checkpoint_layout import Ranges, TensorLayout

__all__ = ["in_blocks_of_file"]


def in_blocks_of_file(layout: TensorLayout, formats: Quantization) -> tuple[TensorLayout, GgufExpertsScheme] | str:
    """The rows of the rank's share and their scheme; or why they are expanded. layout: of a matrix of every expert,
    [num_experts, num_outputs, num_inputs], which the file has one by one."""
    of_file = {without_expert(name.removesuffix(".weight")) for name in layout.tensors}
    if any(expert is None for _, expert in of_file):
        return "the checkpoint has them in one tensor"
    found = {formats.format_of(matrix) for matrix in {matrix for matrix, _ in of_file}}
    kinds = sorted({form.kind if isinstance(form, GgufFormat) else "numbers" for form in found})
    form = found.pop()
    if found:
        return f"gate and up are {' and '.join(kinds)}"
    if not isinstance(form, GgufFormat):
        return "their type has no kernels here"
    share, padding = _whole_blocks(layout, form)
    num_experts, num_outputs, _ = layout.shape if share is None else share.shape(layout.shape)
    if num_outputs % LANES:
        return f"a rank has {num_outputs} outputs of each, no multiple of {LANES}"
    rows = replace(layout, name=f"{layout.name}_rows", share=share, blocks=form)
    return rows, GgufExpertsScheme(form, num_experts, padding)


def _whole_blocks(layout: TensorLayout, form: GgufFormat) -> tuple[Ranges | None, tuple[int, int]]:
    """The share with all of the blocks that it cuts; the inputs that it gets before and after its own."""
    share, (numbers, _) = layout.share, form.block
    if share is None or share.dim != len(layout.shape) - 1:
        return share, (0, 0)
    ((start, length),) = share.ranges
    first, end = start // numbers * numbers, -(-(start + length) // numbers) * numbers
    return Ranges(share.dim, ((first, end - first),)), (start - first, end - start - length)
