"""Checks of a quantized checkpoint's own tensors before a worker starts: dtypes, scales, groups, shapes.

Scales are some percent of a checkpoint. They are read once here, into the page cache, from which the workers read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

import numpy as np

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.model_file import open_model_file
from ringcore.checkpoint.quantization.formats import Format, GptqFormat, PackedFormat
from ringcore.checkpoint.quantization.rules import Quantization
from ringcore.checkpoint.safetensors_header import TensorEntry
from ringcore.errors import ModelLoadError

__all__ = ["check_contents"]

_FLOATS = ("F64", "F32", "F16", "BF16")
_NO_EXPONENT = 255  # of scales that are powers of 2
_INTEGERS = {"I32": np.int32, "I64": np.int64}


def check_contents(index: Mapping[str, TensorEntry], quantization: Quantization) -> None:
    """Raises `ModelLoadError` that names the tensor and its file: of a dtype that is not the format's, a scale that is
    not finite, an input of a group that there is not."""
    _check_experts(index, quantization)
    for matrix, form, tensor, entry in _quantized(index, quantization):
        name = f"{matrix}.{tensor.suffix}"
        fitting = _FLOATS if tensor.dtype == "F32" else (tensor.dtype,)
        if entry.dtype not in fitting:
            raise _bad(
                entry, name, f"is {entry.dtype}, {quantization.method} has it in {' or '.join(map(str, fitting))}"
            )
        if tensor.dtype == "F32" and not _is_finite(entry, name):
            raise _bad(entry, name, "has a scale that is infinite or no number; download it again")
        if tensor.suffix in ("g_idx", "weight_g_idx"):
            _check_groups(entry, name, form)
        if tensor.suffix == "weight_shape":
            _check_shape(entry, name, form, index.get(f"{matrix}.weight_packed"))


def _check_experts(index: Mapping[str, TensorEntry], quantization: Quantization) -> None:
    for tensor in () if quantization.experts is None else quantization.experts.tensors:
        for name, entry in index.items():
            if not name.endswith(tensor.suffix):
                continue
            if entry.dtype != tensor.dtype:
                raise _bad(entry, name, f"is {entry.dtype}, {quantization.method} has it in {tensor.dtype}")
            if tensor.suffix == "_scales" and (np.frombuffer(_read(entry, name), np.uint8) == _NO_EXPONENT).any():
                raise _bad(entry, name, "has the scale 255, which is no number; download it again")


def _quantized(
    index: Mapping[str, TensorEntry], quantization: Quantization
) -> Iterator[tuple[str, Format, MatrixTensor, TensorEntry]]:
    """(matrix, its format, one of its tensors, where it is)."""
    for name, entry in index.items():
        matrix, _, suffix = name.rpartition(".")
        form = quantization.format_of(matrix)
        if form is None or (suffix == "weight" and f"{matrix}.{form.tensors[-1].suffix}" not in index):
            continue  # also of norms and embeddings, which no linear scheme is asked for
        for tensor in form.tensors:
            if tensor.suffix == suffix and tensor.dtype is not None:
                yield matrix, form, tensor, entry


def _bad(entry: TensorEntry, name: str, what: str) -> ModelLoadError:
    return ModelLoadError(f"{entry.file}: tensor {name!r} {what}", path=entry.file, tensor=name)


def _read(entry: TensorEntry, name: str) -> bytes:
    with open_model_file(entry.file) as file:
        data = os.pread(file.fileno(), entry.nbytes, entry.begin)
    if len(data) != entry.nbytes:
        raise _bad(entry, name, "is truncated; download it again")
    return data


def _is_finite(entry: TensorEntry, name: str) -> bool:
    data = _read(entry, name)
    if entry.dtype == "BF16":
        return bool((np.frombuffer(data, "<u2") & 0x7F80 != 0x7F80).all())
    numbers = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[entry.dtype])
    return bool(np.isfinite(numbers).all())


def _check_groups(entry: TensorEntry, name: str, form: Format) -> None:
    assert isinstance(form, GptqFormat | PackedFormat), form
    groups = np.frombuffer(_read(entry, name), "<i4")
    size = form.group or max(1, len(groups))
    if form.has_order:
        if len(groups) and not 0 <= groups.min() <= groups.max() < -(-len(groups) // size):
            raise _bad(entry, name, f"has group {groups.max()} of {-(-len(groups) // size)}; download it again")
    elif not np.array_equal(groups, np.arange(len(groups)) // size):
        raise _bad(entry, name, "is not in order, but 'desc_act' is false; set it to true in quantization_config")


def _check_shape(entry: TensorEntry, name: str, form: Format, packed: TensorEntry | None) -> None:
    assert isinstance(form, PackedFormat), form
    outputs, inputs = np.frombuffer(_read(entry, name), "<i8").tolist()
    per_word = 32 // form.bits
    if packed is not None and packed.shape != (outputs, -(-inputs // per_word)):
        raise _bad(
            entry, name, f"says {[outputs, inputs]}, its packed weights are {list(packed.shape)}; quantize it again"
        )
