"""The body of a model, which makes hidden states of token ids, apart from its head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ringcore.model_executor.models.transformers.handed_down import given_to_body
from ringcore.model_executor.models.transformers.refusal import Refused

__all__ = ["Body", "NewTensors", "TokensBefore", "is_composite"]


class TokensBefore:
    """Stands for a KV cache towards a model that adds the tokens' own count to the number of those in the cache: for
    each token the number that makes the sum its position. It keeps nothing."""

    is_compileable = False

    def __init__(self, positions: torch.Tensor) -> None:
        """positions: [1, num_tokens]"""
        self._before = positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return self._before

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value


# Not those that copy from the host, which a CUDA graph cannot hold.
_NEW = frozenset({torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros})


class NewTensors(TorchFunctionMode):
    """On this thread, new tensors are on `device` where the caller names none: the default is a CPU's. A tensor of one
    number that the caller makes on a device, or moves there from the host, is filled there: a copy cannot be captured.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self.was_needed = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _NEW and kwargs.get("device") is None:
            self.was_needed = True
            return func(*args, **kwargs | {"device": self._device})
        if func is torch.tensor and isinstance(args[0], bool | int | float):
            self.was_needed = True
            if kwargs.get("device") is not None:
                return torch.full((), *args, **kwargs)
        if func is torch.Tensor.to and args[0].dim() == 0 and args[0].device.type == "cpu":
            device, dtype, *_ = torch._C._nn._parse_to(*args[1:], **kwargs)  # as `nn.Module.to` reads them
            if device is not None and device.type != "cpu":
                return torch.full((), args[0].item(), dtype=dtype or args[0].dtype, device=device)
        return func(*args, **kwargs)


class Body:
    """module: the body. path: its name in the model. has_plain_table: a token's embedding is its row. What a recorded
    pass found out:

    counts: whether it counts the positions of its tokens though it is given them
    in_mask: whether it hands down its mask alone, and not its keyword arguments
    makes_tensors: whether it makes some of a number, or does not say on which device (`NewTensors`)
    alike: by name in the body, the layers that compute the same as an earlier one (`alike_layers`), and that one
    num_unread_layers: that text does not reach, of a model of several parts
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises `Refused` for a model that is its own body."""
        self.model = model
        self.counts = self.in_mask = self.makes_tensors = False
        self.alike: Mapping[str, str] = {}
        self.num_unread_layers = 0
        self.path = _around_embeddings(model)
        self.has_plain_table = type(model.get_input_embeddings()) is nn.Embedding
        self.module: PreTrainedModel = model.get_submodule(self.path)

    def check_table(self) -> None:
        """Raises `Refused` for a model whose embeddings heads that draft are not trained for."""
        if not self.has_plain_table:
            raise Refused("its embeddings are more than rows of a table, and heads are not trained for that")

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ringcore: object) -> torch.Tensor:
        """input_ids and positions: [num_tokens] -> hidden states [num_tokens, hidden_size]. ringcore: for the attention
        calls, to which the model hands it down."""
        inputs = {"input_ids": input_ids[None], **self.given(positions[None], ringcore)}
        if self.makes_tensors and input_ids.device.type != "cpu":
            with NewTensors(input_ids.device):
                return self.module(**inputs).last_hidden_state[0]  # type: ignore[no-any-return]
        return self.module(**inputs).last_hidden_state[0]  # type: ignore[no-any-return]

    def given(self, positions: torch.Tensor, ringcore: object) -> dict[str, Any]:
        """Its keyword arguments beside the ids. positions: [1, num_tokens]."""
        given = {"position_ids": positions, "use_cache": False, **given_to_body(ringcore, self.in_mask)}
        return given | {"past_key_values": TokensBefore(positions)} if self.counts else given

    def replaced(self, other: nn.Module) -> PreTrainedModel:
        """The model's forward pass over another body, as a module that shares all other parts: so that whatever the
        model computes after its body is computed. In a model of several parts, what is around the body and has no head
        is replaced with it."""
        head = model = copy.copy(self.model)
        output = self.model.get_output_embeddings()
        *outer, last = self.path.split(".")
        for part in outer:
            module = model._modules[part]
            assert module is not None
            if is_composite(self.model) and (output is None or not _has(module, output)):
                last = part
                break
            module = copy.copy(module)
            model.__dict__["_modules"] = {**model._modules, part: module}
            model = module
        model.__dict__["_modules"] = {**model._modules, last: other}
        return head


def is_composite(model: PreTrainedModel) -> bool:
    """Whether the text model is one of several parts."""
    return model.config.get_text_config() is not model.config


def _around_embeddings(model: PreTrainedModel) -> str:
    """The innermost model around the embedding of the tokens."""
    embeddings = model.get_input_embeddings()
    names: list[str] = [
        name for name, part in model.named_modules() if name and _is_model(part) and _has(part, embeddings)
    ]
    if not names:
        raise Refused("it has no body apart from its head")
    return names[-1]


def _is_model(module: nn.Module) -> bool:
    return isinstance(module, PreTrainedModel)


def _has(module: nn.Module, part: nn.Module) -> bool:
    return any(one is part for one in module.modules())
