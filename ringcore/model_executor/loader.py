"""Fills the final tensors of a model, fused and sliced for one rank, straight from the checkpoint.

A layer declares what it needs as data (`Weight`), in the terms of the checkpoint; nothing here knows a model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ringcore.checkpoint import ModelFiles
from ringcore.errors import ModelLoadError
from ringcore.model_executor.tensor_source import TensorSource, open_source
from ringcore.model_executor.weight import Weight, WeightPart

__all__ = ["Weight", "WeightPart", "load_weights", "pending_weights"]

# Tensors that a checkpoint may hold and no model needs: tables that are computed, and the copy of the embeddings
# that some tied checkpoints carry. Any other tensor without a place means that the model would compute something
# else than its authors did.
_DISPENSABLE = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|lm_head\.weight")


def load_weights(
    weights: Sequence[Weight], files: ModelFiles, seed: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Every weight by name, on `device`, all at once; otherwise as `pending_weights`."""
    with pending_weights(weights, files, seed, device) as pending:
        return {weight.name: pending.pop(weight.name) for weight in weights}


@contextmanager
def pending_weights(
    weights: Sequence[Weight], files: ModelFiles, seed: int, device: torch.device
) -> Iterator[PendingWeights]:
    """The weights by name, each read as it is taken. `seed` matters to dummy weights only.

    A model that packs its weights as it takes them so never has all of them twice. Each final tensor is allocated
    once and only this rank's slices are read. Raises `ModelLoadError`, here and not later, where a tensor is
    missing, has another shape than the model's, or has no place in the model.
    """
    with open_source(files, seed) as source:
        _check(weights, files, source)
        yield PendingWeights(weights, source, device)


class PendingWeights:
    """What `pending_weights` hands out: `pop` reads a weight, once."""

    def __init__(self, weights: Sequence[Weight], source: TensorSource, device: torch.device) -> None:
        self._weights = {weight.name: weight for weight in weights}
        self._source, self._device = source, device

    def __len__(self) -> int:
        return len(self._weights)

    def pop(self, name: str, /) -> torch.Tensor:
        return _load(self._weights.pop(name), self._source, self._device)


def _load(weight: Weight, source: TensorSource, device: torch.device) -> torch.Tensor:
    filled = sum(part.length for part in weight.parts) == weight.shape[weight.parts[0].dim]
    allocate = torch.empty if filled else torch.zeros
    tensor = allocate(weight.shape, dtype=weight.dtype, device=device)
    for part in weight.parts:
        if part.length:
            source.read(part, weight.init, tensor.narrow(part.dim, part.offset, part.length))
    return tensor


def _check(weights: Sequence[Weight], files: ModelFiles, source: TensorSource) -> None:
    """Before anything is read: every tensor is there in the right shape, and none is left over."""
    shapes = source.shapes
    if shapes is None:
        return
    expected = {part.checkpoint_name: part.checkpoint_shape for weight in weights for part in weight.parts}
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise ModelLoadError(
            f"{files.path}: tensor {missing[0]!r} is missing{_and_more(missing)}; the files are incomplete "
            "or config.json describes another model",
            path=files.path,
            tensor=missing[0],
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            file = source.file_of(name)
            raise ModelLoadError(
                f"{file}: tensor {name!r} has the shape {list(shapes[name])}, the configuration asks for "
                f"{list(shape)}; weights and configuration are of different models",
                path=file,
                tensor=name,
            )
    left = [name for name in shapes if name not in expected and not _DISPENSABLE.fullmatch(name)]
    if left:
        file = source.file_of(left[0])
        raise ModelLoadError(
            f"{file}: tensor {left[0]!r} has no place in the model{_and_more(left)}; its output would be wrong "
            "without it: config.json describes another model, or the checkpoint is quantized or carries adapters",
            path=file,
            tensor=left[0],
        )


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
