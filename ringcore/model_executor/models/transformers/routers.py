"""The routers of a model of transformers, in one launch where they are recognised by what they compute.

A router that multiplies by a matrix, takes a softmax or sigmoids and the k largest is seven to twenty operations of
torch for few tokens, each as long as the kernel (`kernels.router`). It is tried with random weights beside that
formula. Its result has the logits too, which mixtures ignore and the kernel does not write, and indices of 64 bits,
where the kernel's have 32: whether a mixture takes that is seen in a pass in which the logits are no tensor.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.kernels.mixtures.expert_matrices import RouterForm, Routing, route_reference
from ringcore.model_executor import ops
from ringcore.model_executor.layers.router import BoundRouter
from ringcore.model_executor.residual import NormedRows, Residual

__all__ = ["FusedRouter", "Routers"]

_NUM_ROWS = 64  # of a trial
_CORRECTION = "e_score_correction_bias"  # the name of the only other tensor that a router has here
_AGREES = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # of weights of 1 at most


class Routers:
    """Of all mixtures of a model."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, run: Callable[[], object]) -> None:
        """model: on meta. run: a pass of it on meta."""
        candidates = {name: one for name, one in model.named_modules() if _may_be_router(one)}
        tried: dict[object, RouterForm | None] = {}
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

    @property
    def paths(self) -> Collection[str]:
        return self._forms.keys()

    def bind(self) -> None:
        """After the tensors of the modules are bound; those of other stages have none."""
        for name, form in self._forms.items():
            module = self._modules[name]
            if ops.has_kernels(module.weight.device):
                module.forward = FusedRouter(module, form)


class FusedRouter:
    """In the place of a module's `forward`: rows of another dtype than its matrix are its own."""

    def __init__(self, module: Any, form: RouterForm) -> None:
        self._own = module.forward
        self.routing = BoundRouter(module.weight, form, *_vectors(module))
        self._hidden_size: int = module.weight.shape[1]

    def __call__(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """hidden_states: [..., hidden_size] -> None, which nothing reads, and [num_tokens, k] twice."""
        rows = hidden_states.reshape(-1, self._hidden_size)
        if rows.dtype != self.routing.dtype:
            own: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self._own(hidden_states)
            return own
        routing = self.routing(NormedRows(Residual(rows.contiguous())))
        return None, routing.weights, routing.experts


def _may_be_router(module: Any) -> bool:
    """Whether it has a matrix, perhaps a bias and a correction, a number of experts to choose, and nothing else."""
    own = module._parameters | module._buffers
    return (
        own.keys() <= {"weight", "bias", _CORRECTION}
        and own.get("weight") is not None
        and own["weight"].dim() == 2
        and not module._modules
        and type(vars(module).get("top_k")) is int
    )


def _vectors(module: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Its bias and its correction."""
    own = module._parameters | module._buffers
    return own.get("bias"), own.get(_CORRECTION)


def _numbers(module: Any) -> dict[str, object]:
    return {name: value for name, value in vars(module).items() if type(value) in (bool, int, float)}


def _form_of(module: Any, dtype: torch.dtype) -> RouterForm | None:
    """By values in float32, and in `dtype`, in which a router that computes in float32 chooses others."""
    k = module.top_k
    try:
        trials = [_trial(module, one) for one in dict.fromkeys((torch.float32, dtype))]
    except (RuntimeError, TypeError, ValueError):  # its forward takes other arguments than hidden rows: it is no router
        return None
    factors = dict.fromkeys([1.0, *(float(n) for n in _numbers(module).values() if type(n) is float)])
    flags = itertools.product((False, True), (False, True), (True, False), factors, (None, torch.float32))
    for normalises, is_sigmoid, rounds_logits, scale, weights_dtype in flags:
        form = RouterForm(k, normalises, is_sigmoid, rounds_logits, scale, weights_dtype)
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
    for name, buffer in module._buffers.items():
        tried._buffers[name] = torch.randn(buffer.shape, generator=generator).to(buffer.dtype) / 4
    rows = (4 * torch.randn(_NUM_ROWS, hidden_size, generator=generator)).to(dtype)
    return rows, tried, tried(rows)


def _agrees(rows: torch.Tensor, tried: Any, result: object, form: RouterForm) -> bool:
    if not isinstance(result, tuple) or len(result) != 3 or any(not isinstance(one, torch.Tensor) for one in result):
        return False
    logits, weights, experts = result
    if experts.shape != (len(rows), form.k) or weights.shape != experts.shape or experts.is_floating_point():
        return False
    ours: Routing = route_reference(rows, tried.weight, form, *_vectors(tried))
    if logits.shape != (len(rows), len(tried.weight)) or weights.dtype != ours.weights.dtype:
        return False
    # Of equal ones any is right, and they may be in any order.
    chosen, ours_chosen = (logits.gather(1, one).sort(-1)[0] for one in (experts, ours.experts))
    found, ours_found = (one.sort(-1)[0] for one in (weights, ours.weights))
    limit = _AGREES[weights.dtype]
    return torch.equal(chosen, ours_chosen) and torch.allclose(found, ours_found, rtol=limit, atol=limit)


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
