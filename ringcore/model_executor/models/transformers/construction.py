"""Builds a model of transformers on the meta device from its configuration, and then the buffers that no checkpoint has
(the frequencies of a rotary embedding).

Nothing global is changed, since the kernel warm-up builds models on another thread at the same time: transformers' own
way to a dtype is torch's global default dtype, so a mode of this thread stands in for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from ringcore.checkpoint import TransformersSpec
from ringcore.model_executor.models.transformers.attention_calls import RECORD
from ringcore.model_executor.models.transformers.body import is_composite
from ringcore.model_executor.models.transformers.meta_shapes import MetaShapes
from ringcore.model_executor.models.transformers.needs import Need
from ringcore.model_executor.models.transformers.refusal import Refused, in_one_line

__all__ = ["build_on_meta", "forget_padding", "make_buffers", "module_of", "on_meta"]

_FACTORIES = frozenset(
    {
        *(torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn, torch.eye),
        *(torch.tensor, torch.as_tensor, torch.arange, torch.linspace),
    }
)


class _DefaultDtype(TorchFunctionMode):
    """On this thread new float tensors have `dtype` where the caller names none."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FACTORIES and (kwargs or {}).get("dtype") is None and result.dtype == torch.float32:
            return result.to(self._dtype)
        return result


def on_meta(spec: TransformersSpec, dtype: torch.dtype) -> PreTrainedModel:
    """The model, in evaluation mode, without memory. Raises `Refused`."""
    try:
        return build_on_meta(json.loads(spec.config), dtype, RECORD)
    except Exception as error:  # transformers' checks of a configuration raise many types
        if isinstance(error, KeyError) and RECORD in error.args:
            raise Refused("its attention is its own code, which nothing can replace", Need.INTERFACE) from error
        need = Need.PACKAGE if isinstance(error, ImportError) else Need.CONFIGURATION
        raise Refused(f"transformers cannot build it: {in_one_line(error)}", need) from error


def build_on_meta(config: dict[str, Any], dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model of a config.json, in evaluation mode, without memory. attention: a name in transformers' interface."""
    # As transformers reads a file, in which infinity is an object.
    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(PreTrainedConfig._decode_special_floats(config))
    with torch.device("meta"), _DefaultDtype(dtype), MetaShapes():
        # float32, the default dtype already: transformers sets what is given here as the default of all threads.
        model = _auto_class(parsed).from_config(parsed, attn_implementation=attention, dtype=torch.float32)
    for one in (parsed, parsed.get_text_config()):
        one.dtype = dtype
    if not is_composite(model):
        forget_padding(model)
    _keep_float32(model, dtype)
    model.eval().requires_grad_(False)
    return model


def forget_padding(model: PreTrainedModel) -> None:
    """No token is padding here. Some models look for it among the ids, on the host; some would refuse to be told."""
    for config in (model.config, model.config.get_text_config()):
        object.__setattr__(config, "pad_token_id", None)


def _auto_class(config: PreTrainedConfig) -> Any:
    """By the kind of model that the checkpoint has, of which the text model may be a part. Some are text alone and yet
    listed among the others only (Mistral 4)."""
    is_text = config.get_text_config() is config and type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    is_other = type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING
    return AutoModelForMultimodalLM if is_other and not is_text else AutoModelForCausalLM


def _keep_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """The parameters that a model class wants in float32 whatever the dtype."""
    names = set() if dtype == torch.float32 else set(model._keep_in_fp32_modules_strict)
    if dtype == torch.float16:
        names |= set(model._keep_in_fp32_modules)
    for name, parameter in list(model.named_parameters()):
        if any(re.search(rf"(^|\.){wanted}($|\.)", name) for wanted in names):
            module, leaf = module_of(model, name)
            module._parameters[leaf] = nn.Parameter(parameter.float(), requires_grad=False)


def module_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and its name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def make_buffers(model: PreTrainedModel) -> None:
    """Computes every buffer on the CPU, by the initializer of its model class, as transformers' own loading does. The
    parameters must be on meta still: the same initializer would fill them with random numbers."""
    for owner, module in _with_owners(model, model):
        buffers = [leaf for leaf, buffer in module._buffers.items() if buffer is not None]
        for leaf in buffers:
            module._buffers[leaf] = _unset(module._buffers[leaf])
        if buffers:
            owner._init_weights(module)


def _unset(buffer: torch.Tensor | None) -> torch.Tensor:
    """On the CPU, with contents that cannot go unnoticed where an initializer forgets them."""
    assert buffer is not None
    number = float("nan") if buffer.is_floating_point() else -(1 << 20)
    return torch.full(buffer.shape, number, dtype=buffer.dtype, device="cpu")


def _with_owners(module: nn.Module, owner: PreTrainedModel) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Every module, with the nearest model class around it, whose initializer knows it."""
    owner = module if isinstance(module, PreTrainedModel) else owner
    yield owner, module
    for child in module.children():
        yield from _with_owners(child, owner)
