"""The layers of a decoder on a CPU, recorded for numbers of tokens that are frequent: one call for all of them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext
from ringcore.kernels.native.attention_kernels import AttentionStep
from ringcore.kernels.native.program import NativeProgram, NotRecordable, Workspace, programs_library
from ringcore.model_executor.layers.rotary import CpuRotation
from ringcore.model_executor.models.decoder_layer import LayerInputs
from ringcore.model_executor.residual import Residual

__all__ = ["RecordedLayers"]

_log = logging.getLogger(__name__)
_MOST_TOKENS = 64
_MISSES = 4  # steps of a size before it is recorded, which takes as long as two of them

Layers = Callable[[Residual, LayerInputs], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Recorded:
    program: NativeProgram
    hidden: torch.Tensor  # [n, hidden_size]: this and the next two are what the program reads
    rotations: Sequence[CpuRotation]
    plans: Sequence[AttentionStep]
    result: torch.Tensor

    def run(self, hidden: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        self.hidden.copy_(hidden)
        for ours, rotation in zip(self.rotations, inputs.rotations, strict=True):
            assert isinstance(rotation, CpuRotation)
            ours.angles.copy_(rotation.angles)
        for plan, group in zip(self.plans, inputs.ctx.groups, strict=True):
            assert isinstance(group.plan, AttentionStep)
            plan.follow(group.plan)
        self.program.run()
        return self.result.clone()


class RecordedLayers:
    """Calls `layers`, or runs what was recorded of it. The results are the same to the last bit: kernels compute a row
    alone, whatever the threads.

    A model whose layers do anything but call C kernels is not recorded, nor is one of several ranks, whose sums wait
    for each other.
    """

    def __init__(self, layers: Layers, num_ranks: int = 1) -> None:
        self._layers = layers
        self._recorded: dict[int, _Recorded] = {}
        self._misses: Counter[int] = Counter()
        self._workspace: Workspace | None = None
        self._kv_caches: Mapping[int, torch.Tensor] | None = None
        self._is_refused = num_ranks > 1

    def forget(self) -> None:
        """Weights are elsewhere now."""
        self._recorded.clear()

    def __call__(self, hidden: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        """hidden: [n, hidden_size], which may be written -> the result of `layers`."""
        n = len(hidden)
        if self._is_refused or n > _MOST_TOKENS or not _is_of_kernels(inputs):
            return self._layers(Residual(hidden), inputs)
        if self._kv_caches is not inputs.ctx.kv_caches:
            self._kv_caches = inputs.ctx.kv_caches
            self._recorded.clear()
        if n not in self._recorded and not self._record(hidden, inputs):
            return self._layers(Residual(hidden), inputs)
        return self._recorded[n].run(hidden, inputs)

    def _record(self, hidden: torch.Tensor, inputs: LayerInputs) -> bool:
        """Whether it was worth it, and did not fail."""
        n, library = len(hidden), programs_library()
        self._misses[n] += 1
        if self._misses[n] < _MISSES:
            return False
        try:
            if library is None:
                raise NotRecordable("no C compiler is installed")
            workspace = self._workspace = self._workspace or Workspace()
            program, rows, ours = NativeProgram(library, workspace), hidden.clone(), _own(inputs)
            result = program.record(lambda: self._layers(Residual(rows), ours))
        except NotRecordable as reason:
            self._is_refused = True
            _log.info("layers are called one by one: %s", reason)
            return False
        rotations = [each for each in ours.rotations if isinstance(each, CpuRotation)]
        plans = [group.plan for group in ours.ctx.groups if isinstance(group.plan, AttentionStep)]
        self._recorded[n] = _Recorded(program, rows, rotations, plans, result)
        return True


def _is_of_kernels(inputs: LayerInputs) -> bool:
    return (
        inputs.ctx.tokens is NO_TOKEN_CONTEXT
        and all(isinstance(rotation, CpuRotation) for rotation in inputs.rotations)
        and all(isinstance(group.plan, AttentionStep) for group in inputs.ctx.groups)
    )


def _own(inputs: LayerInputs) -> LayerInputs:
    """With memory of its own for what each step has anew."""
    rotations = [
        replace(each, angles=each.angles.clone()) for each in inputs.rotations if isinstance(each, CpuRotation)
    ]
    ctx = inputs.ctx
    groups = tuple(replace(group, plan=group.backend.plan(group.metadata)) for group in ctx.groups)
    return LayerInputs(ForwardContext(groups, ctx.group_of_layer, ctx.kv_caches), rotations)
