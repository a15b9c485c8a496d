"""The text model of a model of several parts, as those that see images are.

The model is built whole, and a pass over text is recorded: what it does not read belongs to the other parts. That is
left out, and so are its tensors of the checkpoint. The text model is then run by itself, if its attention is the same
alone and within the whole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.model_executor.models.transformers.alike_layers import lists_of
from ringcore.model_executor.models.transformers.attention_calls import Refused, record_masked, record_whole
from ringcore.model_executor.models.transformers.body import Body, is_composite
from ringcore.model_executor.models.transformers.checkpoint_layout import CheckpointNames
from ringcore.model_executor.models.transformers.construction import forget_padding
from ringcore.model_executor.models.transformers.needs import Need

__all__ = ["LeftOut", "keep_text"]


class LeftOut:
    """The names of a checkpoint's tensors that are left out: those of layers that only predict several tokens at once,
    by the configuration or as transformers' model class leaves them out, and those of the parts that were removed."""

    def __init__(
        self, model: PreTrainedModel, parts: Collection[str] = (), names: CheckpointNames | None = None
    ) -> None:
        """parts: names of modules and parameters. names: of the model before they were removed."""
        text = model.config.get_text_config()
        first, count = (getattr(text, name, None) or 0 for name in ("num_hidden_layers", "num_nextn_predict_layers"))
        own = [rf"\blayers\.{layer}\." for layer in range(first, first + count)]
        self._patterns = [re.compile(pattern) for pattern in [*model._keys_to_ignore_on_load_unexpected, *own]]
        self._parts, self._names = parts, names

    def __contains__(self, checkpoint_name: str) -> bool:
        if any(pattern.search(checkpoint_name) for pattern in self._patterns):
            return True
        if self._names is None:
            return False
        name = self._names.in_model(checkpoint_name)
        return any(name == part or name.startswith(f"{part}.") for part in self._parts)


def keep_text(body: Body, num_positions: int) -> LeftOut:
    """Removes all but the text model and its head from a model of several parts. Raises `Refused`."""
    model = body.model
    if not is_composite(model):
        return LeftOut(model)
    names = CheckpointNames(model)
    whole, read = record_whole(model, num_positions)
    forget_padding(model)  # the whole may put it where images are
    if whole != record_masked(body, num_positions):
        raise Refused("its text model computes something else by itself than as a part of it", Need.TEXT_PART)
    parts = [*_remove_unread(model, body.path, read), *_remove_unread_layers(body, read)]
    tied = model.all_tied_weights_keys
    for name in [name for name in tied if any(name.startswith(f"{part}.") for part in parts)]:
        del tied[name]
    return LeftOut(model, parts, names)


def _remove_unread(model: nn.Module, path: str, read: Collection[int]) -> Iterator[str]:
    """Around the body, whose path is given: what holds tensors and of which none was read. -> the names."""
    outer = ""
    for part in path.split("."):
        for name, child in list(model._modules.items()):
            if name != part and child is not None and _is_unread(child, read):
                del model._modules[name]
                yield outer + name
        for name, parameter in list(model._parameters.items()):
            if parameter is not None and not _is_read(parameter, read):
                del model._parameters[name]
                yield outer + name
        child = model._modules[part]
        assert child is not None
        model, outer = child, f"{outer}{part}."


def _remove_unread_layers(body: Body, read: Collection[int]) -> Iterator[str]:
    """Layers that only what is no text reaches, as those that attend to images do. -> the names."""
    names = {module: name for name, module in body.module.named_modules()}
    for layers in lists_of(body.module):
        for index, layer in enumerate(layers):
            if _is_unread(layer, read):
                layers[index] = nn.Module()
                body.num_unread_layers += 1
                yield f"{body.path}.{names[layer]}"


def _is_unread(module: nn.Module, read: Collection[int]) -> bool:
    """Whether it holds tensors of which none was read."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and not any(_is_read(tensor, read) for tensor in tensors)


def _is_read(tensor: torch.Tensor, read: Collection[int]) -> bool:
    return tensor.untyped_storage()._cdata in read
