"""What a sample pass has in the place of a model's modules with large tensors."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel

__all__ = ["EMBEDDING_SIZE", "NUM_IDS", "NotRecognised", "SampleLinear", "SampleNumbers", "fill", "replace_large"]

NUM_IDS = 64  # rows of an embedding
EMBEDDING_SIZE = 4.0  # the root mean square of its numbers: of the magnitude of what layers add to them
_RANK = 8
_MAX_SMALL = 1 << 20  # numbers of a tensor that is filled as it is
_TABLE, _STEP = 1 << 21, 104_729  # of `SampleNumbers`: a prime, so that places come again late


class NotRecognised(Exception):
    """Why a part of a model stays transformers' own, in one line."""


class SampleNumbers:
    """Standard normal numbers: rows of one table from ever other places, since a model wants many millions."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._table = torch.randn(_TABLE, generator=self._generator)
        self._taken = 0

    def __call__(self, *shape: int) -> torch.Tensor:
        """Not to be written to."""
        count = math.prod(shape)
        if 2 * count > _TABLE:
            return torch.randn(shape, generator=self._generator)
        self._taken += 1
        start = self._taken * _STEP % (_TABLE - count)
        return self._table[start : start + count].view(shape)

    def ids(self, *shape: int) -> torch.Tensor:
        """Of tokens."""
        return torch.randint(NUM_IDS, shape, generator=self._generator)


class SampleLinear(nn.Module):
    """Stands for a linear: a product by two thin matrices. It has no `weight`: code that reads the weight of a linear
    by itself fails, and is not replaced."""

    def __init__(self, linear: nn.Linear, numbers: SampleNumbers) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._thin, self._wide = numbers(linear.in_features, _RANK), numbers(_RANK, linear.out_features)
        self._scale = (linear.in_features * _RANK) ** -0.5
        self.bias = None if linear.bias is None else nn.Parameter(numbers(linear.out_features) / 2)
        self.outputs: list[torch.Tensor] | None = None  # collected as leaves of the autograd graph, where given

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in] -> [..., out], without the bias."""
        out: torch.Tensor = (x @ self._thin * self._scale) @ self._wide
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.product(x)
        out = out if self.bias is None else out + self.bias
        if self.outputs is not None:
            out = out.detach().requires_grad_()
            self.outputs.append(out)
        return out


class _StandIn(nn.Module):
    """Stands for a sublayer with large tensors: a function of its input, in the structure that the sublayer returns.
    Its modules that have none, of the same size at both ends (shared experts), are called beside it, to be seen."""

    def __init__(self, module: nn.Module, size: int, numbers: SampleNumbers) -> None:
        super().__init__()
        inner = {name: child for name, child in module.named_children() if _is_small(child)}
        self._inner = list(inner)
        for name, child in inner.items():
            self.add_module(name, copy.deepcopy(child))
        fill(self, numbers)
        self._on_meta = module.to("meta", torch.float32)
        self._linear = SampleLinear(nn.Linear(size, size, device="meta"), numbers)
        self._structure: int | None = None  # the length of the tuple that the sublayer returns; 0: it returns a tensor

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for name in self._inner:
            self.get_submodule(name)(x)
        value = self._linear(x).tanh()
        if self._structure is None:
            on_meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
            out = self._on_meta(x.to("meta"), *on_meta[0], **on_meta[1])
            self._structure = len(out) if isinstance(out, tuple) else 0
        return (value, *[None] * (self._structure - 1)) if self._structure else value


def replace_large(body: PreTrainedModel, layer: str, attention: str, numbers: SampleNumbers) -> None:
    """Puts stand-ins in place of the sublayers, but attention, that have large tensors outside linears."""
    module = body.get_submodule(layer)
    for name, child in module.named_children():
        if f"{layer}.{name}" == attention:
            continue
        if not _has_no_large(child):
            setattr(module, name, _StandIn(child, body.config.get_text_config().hidden_size, numbers))


def _is_small(module: nn.Module) -> bool:
    """Whether it is made of linears, which are no large tensors of a sample."""
    return _has_no_large(module) and len([one for one in module.modules() if type(one) is nn.Linear]) > 1


def _has_no_large(module: nn.Module) -> bool:
    return all(_is_fillable(inner, p) for inner in module.modules() for p in inner.parameters(recurse=False))


def _is_fillable(module: nn.Module, parameter: nn.Parameter) -> bool:
    return type(module) is nn.Linear or (parameter.dim() == 1 and parameter.numel() <= _MAX_SMALL)


def fill(root: nn.Module, numbers: SampleNumbers) -> None:
    """Random values in place of the parameters, by kind of module."""
    for name, child in list(root.named_children()):
        if type(child) is nn.Linear:
            setattr(root, name, SampleLinear(child, numbers))
        elif not isinstance(child, _StandIn):
            fill(child, numbers)
    for name, parameter in list(root.named_parameters(recurse=False)):
        shape = list(parameter.shape)
        if isinstance(root, nn.Embedding):
            shape[0], root.padding_idx = NUM_IDS, None
        if torch.Size(shape).numel() > _MAX_SMALL:
            raise NotRecognised(f"{type(root).__name__} has a large tensor {name!r}")
        # Factors that are far from equal and from 0.
        spread = numbers(*shape)
        value = EMBEDDING_SIZE * spread if isinstance(root, nn.Embedding) else 1 + spread / 4
        root._parameters[name] = nn.Parameter(value, requires_grad=False)
    for name, buffer in root._buffers.items():
        if buffer is not None and buffer.isnan().any():  # a checkpoint has it
            root._buffers[name] = 1 + numbers(*buffer.shape) / 4
