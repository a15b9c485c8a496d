"""The routers of a model of transformers, in one launch where they are recognised by what they compute.

A router that multiplies by a matrix, takes a softmax and the k largest is seven operations of torch for few tokens,
each as long as the kernel (`kernels.router`). It is tried with random weights beside that formula. Its result has the
logits too, which mixtures ignore and the kernel does not write, and indices of 64 bits, where the kernel's have 32:
whether a mixture takes that is seen in a pass in which the logits are no tensor.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.kernels.expert_matrices import Routing, route_reference
from ringcore.model_executor import ops

__all__ = ["Routers"]

_NUM_ROWS = 64  # of a trial
_AGREES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of weights of 1 at most


@dataclass(frozen=True, slots=True)
class _RouterForm:
    """A softmax over all experts and the k largest of it. normalises: these sum to 1, as those of a softmax over the k
    largest logits do. is_wide: its weights are float32 in any dtype."""

    k: int
    normalises: bool
    is_wide: bool

    @property
    def dtype(self) -> torch.dtype | None:
        return torch.float32 if self.is_wide else None


class Routers:
    """Of all mixtures of a model."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, run: Callable[[], object]) -> None:
        """model: on meta. run: a pass of it on meta."""
        candidates = {name: one for name, one in model.named_modules() if _may_be_router(one)}
        tried: dict[object, _RouterForm | None] = {}
        found = {}
        for name, module in candidates.items():
            key = type(module), module.weight.shape, module.top_k, tuple(sorted(_numbers(module).items()))
            if key not in tried:
                tried[key] = _form_of(module, dtype)
            if (form := tried[key]) is not None:
                found[name] = form
        self._modules: dict[str, Any] = {name: candidates[name] for name in found}
        self._forms = found if found and _is_enough(list(self._modules.values()), run) else {}

    def __len__(self) -> int:
        return len(self._forms)

    def bind(self) -> None:
        """After the tensors of the modules are bound; those of other stages have none."""
        for name, form in self._forms.items():
            module = self._modules[name]
            if ops.has_kernels(module.weight.device):
                module.forward = _FusedRouter(module, form)


class _FusedRouter:
    """In the place of a module's `forward`: more tokens than the kernel takes are its own."""

    def __init__(self, module: Any, form: _RouterForm) -> None:
        from ringcore.kernels import router

        self._module, self._form, self._own = module, form, module.forward
        self._route, self._max_tokens = router.route, router.MAX_TOKENS
        self._counter = router.new_router_counter(module.weight.device)

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """hidden_states: [..., hidden_size] -> None, which nothing reads, and [num_tokens, k] twice."""
        weight: torch.Tensor = self._module.weight
        rows = hidden_states.reshape(-1, weight.shape[1])
        if len(rows) > self._max_tokens or rows.dtype != weight.dtype:
            own: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._own(hidden_states)
            return own
        bias = self._module._parameters.get("bias")
        given = weight, self._form.k, self._form.normalises
        routing = self._route(rows.contiguous(), *given, counter=self._counter, bias=bias, dtype=self._form.dtype)
        return None, routing.weights, routing.experts


def _may_be_router(module: Any) -> bool:
    """Whether it has a matrix, perhaps a bias, a number of experts to choose, and nothing else."""
    own = module._parameters
    return (
        own.keys() <= {"weight", "bias"}
        and own.get("weight") is not None
        and own["weight"].dim() == 2
        and not module._buffers
        and not module._modules
        and type(vars(module).get("top_k")) is int
    )


def _numbers(module: Any) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if type(value) in (bool, int, float)}


def _form_of(module: Any, dtype: torch.dtype) -> _RouterForm | None:
    """By values in float32, and in `dtype`, in which a router that computes in float32 chooses others."""
    k = module.top_k
    try:
        trials = [_trial(module, one) for one in dict.fromkeys((torch.float32, dtype))]
    except (RuntimeError, TypeError, ValueError):  # its forward takes other arguments than hidden rows: it is no router
        return None
    for normalises, is_wide in itertools.product((False, True), (False, True)):
        form = _RouterForm(k, normalises, is_wide)
        if all(_agrees(*trial, form) for trial in trials):
            return form
    return None


def _trial(module: Any, dtype: torch.dtype) -> tuple[torch.Tensor, nn.Module, object]:
    """Random rows [_NUM_ROWS, hidden_size], a copy with random weights, and its result."""
    generator, tried = torch.Generator().manual_seed(0), copy.deepcopy(module)
    hidden_size = module.weight.shape[1]
    for name, parameter in module._parameters.items():
        if parameter is not None:
            values = torch.randn(parameter.shape, generator=generator) * hidden_size**-0.5
            tried._parameters[name] = nn.Parameter(values.to(dtype), requires_grad=False)
    rows = (4 * torch.randn(_NUM_ROWS, hidden_size, generator=generator)).to(dtype)
    return rows, tried, tried(rows)


def _agrees(rows: torch.Tensor, tried: Any, result: object, form: _RouterForm) -> bool:
    if not isinstance(result, tuple) or len(result) != 3 or any(not isinstance(one, torch.Tensor) for one in result):
        return False
    logits, weights, experts = result
    if experts.shape != (len(rows), form.k) or weights.shape != experts.shape or experts.is_floating_point():
        return False
    bias = tried._parameters.get("bias")
    ours: Routing = route_reference(rows, tried.weight, form.k, form.normalises, bias, form.dtype)
    if logits.shape != (len(rows), len(tried.weight)) or weights.dtype != ours.weights.dtype:
        return False
    chosen, ours_chosen = logits.gather(1, experts), logits.gather(1, ours.experts)  # of equal ones any is right
    limit = _AGREES[rows.dtype]
    return torch.equal(chosen, ours_chosen) and torch.allclose(weights, ours.weights, rtol=limit, atol=limit)


def _is_enough(modules: list[nn.Module], run: Callable[[], object]) -> bool:
    """Whether the mixtures of these routers need no more than the kernel gives."""

    def narrowed(
        module: nn.Module, given: object, result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[object, torch.Tensor, torch.Tensor]:
        _, weights, experts = result
        return object(), weights, experts.int()

    hooks = [module.register_forward_hook(narrowed) for module in modules]
    try:
        run()
    except Exception:  # of any type: something was done to what is no tensor
        return False
    finally:
        for hook in hooks:
            hook.remove()
    return True
