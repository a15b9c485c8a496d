"""Mixtures of a model of transformers whose result is added to the residual stream by their experts' last kernel.

A mixture stays the model's own module, which returns rows that its layer adds. Where it returns nothing but the rows of
its experts, chosen by its router, perhaps plus those of one more module (shared experts), few tokens need no rows: the
experts add to the stream, and the shared ones after them. Whether it does is seen in a call in which the router, the
experts and the other modules are stand-ins that return known rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ringcore.model_executor.layers.experts import BoundExperts
from ringcore.model_executor.models.transformers.expert_forms import is_experts
from ringcore.model_executor.models.transformers.fusion.fused_modules import FusedMLP
from ringcore.model_executor.models.transformers.routers import FusedRouter
from ringcore.model_executor.residual import NormedRows, Residual

__all__ = ["Mixtures"]

_NUM_TOKENS, _K = 3, 2  # of the call


class BoundMixture:
    def __init__(self, router: FusedRouter, experts: BoundExperts, shared: nn.Module | None) -> None:
        self._router, self._experts, self._shared = router, experts, shared

    def add_to(self, stream: Residual, x: NormedRows) -> None:
        """stream [n, hidden_size] += the mixture of x [n, hidden_size]."""
        routing = self._router.routing(x)  # first, so that its norm takes a deferred add
        if self._shared is not None:
            x = NormedRows(Residual(x.rows))  # the experts read them after the stream has changed, and defer their add
            if isinstance(self._shared, FusedMLP):
                self._shared.add_to(stream, x.rows)
            else:
                stream.rows.add_(self._shared(x.rows[None])[0])
        self._experts.add_to(stream, x, routing)


class Mixtures:
    """Of all mixtures of a model."""

    def __init__(self, model: PreTrainedModel, routers: Collection[str], hidden_size: int) -> None:
        """model: on meta. routers: the paths of those that are recognised."""
        self._found: list[tuple[Any, str | None]] = []  # the mixture, and the name of its shared module
        for path in routers:
            parent, _, name = path.rpartition(".")
            mixture = model.get_submodule(parent)
            shared = _tried(mixture, name, hidden_size)
            if shared is not None:
                self._found.append((mixture, shared or None))

    def __len__(self) -> int:
        return len(self._found)

    def bind(self) -> None:
        """After the routers and experts are bound; those of other stages are not."""
        for mixture, shared in self._found:
            children = dict(mixture.named_children())
            router = next((one.forward for one in children.values() if isinstance(one.forward, FusedRouter)), None)
            experts = next((vars(one).get("ringcore") for one in children.values() if is_experts(one)), None)
            if router is None or not isinstance(experts, BoundExperts):
                continue
            if router.routing.dtype == experts.matrices.up.dtype:  # some keep their matrix in float32
                mixture.ringcore = BoundMixture(router, experts, None if shared is None else children[shared])


def _tried(mixture: nn.Module, router: str, hidden_size: int) -> str | None:
    """The name of the shared module, "" if there is none; None: the mixture computes something else."""
    children = dict(mixture.named_children())
    experts = [name for name, child in children.items() if is_experts(child)]
    others = [name for name, child in children.items() if _has_parameters(child) and name not in (router, *experts)]
    if len(experts) != 1 or len(others) > 1 or _has_parameters(mixture, recurse=False):
        return None
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x, of_experts, of_other = (random(1, _NUM_TOKENS, hidden_size) for _ in range(3))
    weights, chosen = random(_NUM_TOKENS, _K), torch.arange(_NUM_TOKENS * _K).view(_NUM_TOKENS, _K)
    seen: list[tuple[object, ...]] = []

    def stand_in(result: Callable[[torch.Tensor], object]) -> Callable[..., object]:
        def called(rows: torch.Tensor, *given: object) -> object:
            seen.append((rows.reshape(x.shape), *given))
            return result(rows)

        return called

    stand_ins: dict[str, Callable[..., object]] = {
        router: stand_in(lambda rows: (object(), weights, chosen)),
        experts[0]: stand_in(lambda rows: of_experts.view(rows.shape)),
        **{name: stand_in(lambda rows: of_other.view(rows.shape)) for name in others},
    }
    out = _called(mixture, stand_ins, x)
    expected = [(x,), (x, chosen, weights), *[(x,)] * len(others)]
    if out is None or not _are_equal(sorted(seen, key=len), sorted(expected, key=len)):
        return None
    total = of_experts + of_other if others else of_experts
    return (others or [""])[0] if out.numel() == x.numel() and torch.equal(out.view(x.shape), total) else None


def _has_parameters(module: nn.Module, recurse: bool = True) -> bool:
    return next(module.parameters(recurse), None) is not None


def _called(mixture: nn.Module, stand_ins: dict[str, Callable[..., object]], x: torch.Tensor) -> torch.Tensor | None:
    modules = {name: mixture.get_submodule(name) for name in stand_ins}
    for name, stand_in in stand_ins.items():
        mixture._modules[name] = _StandIn(stand_in)
    try:
        out = mixture(x)
    except Exception:  # of any type: something was done to what is no tensor, or an argument is another
        return None
    finally:
        mixture._modules.update(modules)
    out = out[0] if isinstance(out, tuple) else out
    return out if isinstance(out, torch.Tensor) else None


def _are_equal(seen: list[tuple[object, ...]], expected: list[tuple[torch.Tensor, ...]]) -> bool:
    return [len(one) for one in seen] == [len(one) for one in expected] and all(
        isinstance(ours, torch.Tensor) and torch.equal(ours, theirs)
        for one, other in zip(seen, expected, strict=True)
        for ours, theirs in zip(one, other, strict=True)
    )


class _StandIn(nn.Module):
    def __init__(self, called: Callable[..., object]) -> None:
        super().__init__()
        self._called = called

    def forward(self, *given: object) -> object:
        return self._called(*given)
