"""Experts that stay in the blocks of a GGUF file: rows of whole blocks, of which a rank's share may be a part."""

from __future__ import annotations

from dataclasses import replace

from ringcore.checkpoint.gguf_library_names import without_expert
from ringcore.checkpoint.quantization import GgufFormat, Quantization
from ringcore.model_executor.expert_schemes.concatenated import ConcatenatedScheme
from ringcore.model_executor.expert_schemes.gguf_experts import GgufExpertsScheme
from ringcore.model_executor.expert_schemes.scheme import ExpertsScheme
from ringcore.model_executor.linear_schemes.block_kernels import LANES
from ringcore.model_executor.models.transformers.checkpoint_layout import Ranges, TensorLayout

__all__ = ["in_blocks_of_file"]


def in_blocks_of_file(layout: TensorLayout, formats: Quantization) -> tuple[list[TensorLayout], ExpertsScheme] | str:
    """The rows of the rank's share, of gate and up apart where their types differ, and their scheme; or why they are
    expanded. layout: of a matrix of every expert, [num_experts, num_outputs, num_inputs], which the file has one by
    one."""
    of_file = [without_expert(name.removesuffix(".weight")) for name in layout.tensors]
    if any(expert is None for _, expert in of_file):
        return "the checkpoint has them in one tensor"
    found = {matrix: formats.format_of(matrix) for matrix, _ in of_file}
    forms = {matrix: form for matrix, form in found.items() if isinstance(form, GgufFormat)}
    if len(forms) < len(found):
        kinds = sorted(form.kind for form in forms.values())
        return f"gate and up are {kinds[0]} and numbers" if kinds else "their type has no kernels here"
    if len(set(forms.values())) == 1:
        parts = [(layout, "_rows", form) for form in set(forms.values())]
    else:
        parts = [
            (_of_matrix(layout, matrix), f"_{matrix.rpartition('.')[2]}_rows", form) for matrix, form in forms.items()
        ]
    rows, schemes = [], []
    for part, suffix, form in parts:
        share, padding = _whole_blocks(part, form)
        num_experts, num_outputs, _ = part.shape if share is None else share.shape(part.shape)
        if num_outputs % LANES:
            return f"a rank has {num_outputs} outputs of each, no multiple of {LANES}"
        rows.append(replace(part, name=f"{part.name}{suffix}", share=share, blocks=form))
        schemes.append(GgufExpertsScheme(form, num_experts, padding, suffix))
    return rows, schemes[0] if len(schemes) == 1 else ConcatenatedScheme(tuple(schemes))


def _of_matrix(layout: TensorLayout, matrix: str) -> TensorLayout:
    """Of one of the matrices whose outputs each expert has one after the other; with the rank's share of it."""
    pieces = [piece for piece in layout.pieces if without_expert(piece.checkpoint_name)[0] == f"{matrix}.weight"]
    (num_experts, num_outputs, num_inputs), own = layout.shape, pieces[0].shape[0]
    first, share = pieces[0].offset % num_outputs, layout.share
    if share is not None and share.dim == 1:
        both = [range(max(start, first), min(start + length, first + own)) for start, length in share.ranges]
        share = Ranges(1, tuple((one.start - first, len(one)) for one in both if one))
    moved = tuple(replace(piece, offset=piece.offset // num_outputs * own) for piece in pieces)
    return replace(layout, shape=(num_experts, own, num_inputs), pieces=moved, share=share)


def _whole_blocks(layout: TensorLayout, form: GgufFormat) -> tuple[Ranges | None, tuple[int, int]]:
    """The share with all of the blocks that it cuts; the inputs that it gets before and after its own."""
    share, (numbers, _) = layout.share, form.block
    if share is None or share.dim != len(layout.shape) - 1:
        return share, (0, 0)
    ((start, length),) = share.ranges
    first, end = start // numbers * numbers, -(-(start + length) // numbers) * numbers
    return Ranges(share.dim, ((first, end - first),)), (start - first, end - start - length)
