"""A program that compares a checkpoint's tensors with those of the model that its configuration describes, on meta.

It imports torch, so a front end runs it in a process of its own before a worker starts: `front_end.folder_check`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable

import torch

from ringcore.checkpoint import TensorIndex, TransformersSpec
from ringcore.checkpoint.expected_tensors import check_tensors, is_dispensable
from ringcore.checkpoint.mtp_head import MtpHeadSpec
from ringcore.errors import ModelLoadError, error_to_wire
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.checkpoint_layout import read_layouts
from ringcore.model_executor.models.transformers.construction import on_meta
from ringcore.model_executor.models.transformers.experts import Experts
from ringcore.model_executor.models.transformers.quantized_linears import dense_names, quantized_shapes
from ringcore.model_executor.models.transformers.refusal import refusals_of
from ringcore.model_executor.models.transformers.text_part import keep_text
from ringcore.model_executor.tensor_source import open_source
from ringcore.protocol.codec import decoder
from ringcore.protocol.folder_check import CHANNEL, FolderCheckStart
from ringcore.protocol.job_channel import framed

__all__ = ["check_folder", "main"]


def check_folder(start: FolderCheckStart) -> None:
    """Raises `ModelLoadError` for a tensor that is missing, of another shape, or without a place in the model, and for
    a model that no head can draft for, where one is to."""
    spec, files = start.spec, start.files
    with refusals_of(spec), torch.no_grad():
        model = on_meta(spec, torch.float32)
        body = Body(model)
        if start.head is not None:
            body.check_table()
        left_out = keep_text(body, spec.max_position_embeddings)
        layouts = read_layouts(model, dense_names(TensorIndex(spec.weight_files), spec.quantization))
        Experts(model, spec.quantization).store(layouts)
        of_head = dict(_tensors_of(start.head)) if isinstance(start.head, MtpHeadSpec) else {}
    expected = quantized_shapes(model, layouts, spec.quantization) | of_head
    with open_source(files, 0, expected) as source:
        assert source.shapes is not None, files
        check_tensors(
            expected,
            source.shapes,
            files.path,
            source.file_of,
            lambda name: is_dispensable(name) or name in left_out,
        )


def _tensors_of(head: MtpHeadSpec) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Those of its decoder layer, by their names in the checkpoint."""
    assert isinstance(head.layer, TransformersSpec), head
    model = on_meta(head.layer, torch.float32)
    layouts = read_layouts(model)
    Experts(model, None).store(layouts)
    layers = Body(model).path + ".layers."
    for name, layout in layouts.items():
        if name.startswith(layers):
            for part, shape in layout.tensors.items():
                yield head.in_checkpoint(part), shape


def main(payload: bytes, fds: dict[str, int]) -> None:
    """Called by the entry of the process: `lean_programs.check_folder`."""
    with socket.socket(fileno=fds[CHANNEL]) as channel:
        try:
            check_folder(decoder(FolderCheckStart).decode(payload))
        except ModelLoadError as error:
            channel.sendall(framed(json.dumps(error_to_wire(error)).encode()))
        else:
            channel.sendall(framed(b""))
