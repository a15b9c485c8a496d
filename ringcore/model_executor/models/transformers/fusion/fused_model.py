"""Fusion of a whole model: what is recognised, put in its place, with weights and rotary tables of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch.utils._pytree import tree_map

from ringcore.attention.layer import AnyAttention
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.rotary import RotaryTable, Rotation
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.checkpoint_layout import TensorLayout
from ringcore.model_executor.models.transformers.fusion.coverage import Part, fitting, modules_of
from ringcore.model_executor.models.transformers.fusion.fused_body import FusedBody, fuse
from ringcore.model_executor.models.transformers.fusion.fused_layer import FusedLayer
from ringcore.model_executor.models.transformers.fusion.parts import Parts
from ringcore.model_executor.models.transformers.fusion.plan import RotaryPlan
from ringcore.model_executor.models.transformers.fusion.recognised import Recognised
from ringcore.model_executor.models.transformers.fusion.recognition import recognise
from ringcore.model_executor.models.transformers.fusion.sample_pass import cosines_and_sines
from ringcore.model_executor.models.transformers.fusion.trial import angle_table
from ringcore.model_executor.weight import SeenTensors, Weight

__all__ = ["Fusion"]


@dataclass(slots=True)
class Fusion:
    """replaced: names in the model of the modules and tensors in whose place our layers have theirs. linears: of the
    model's linears that our products may compute."""

    recognised: Recognised
    replaced: frozenset[str]
    linears: frozenset[str]
    _body: FusedBody = field(default_factory=FusedBody)
    _angles: list[torch.Tensor] = field(default_factory=list)  # by rotary, until they are bound
    _rotaries: list[RotaryTable] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        body: Body,
        calls: Sequence[AttentionCall],
        layouts: Mapping[str, TensorLayout],
        dtype: torch.dtype,
        num_ranks: int,
        num_positions: int,
    ) -> Self:
        """Of a body on meta, whose attention calls were recorded. num_positions: of the model."""
        prefix = f"{body.path}."
        found = recognise(body.module, calls, num_positions, body.in_mask, body.alike)
        if body.counts:  # a sample pass is over one sequence, of few positions
            reasons = {**found.reasons, "": "its attention counts the positions of its tokens itself"}
            found = replace(found, plans={}, attentions={}, reasons=reasons)
        found = fitting(found, calls, _in_body(layouts, prefix), dtype, num_ranks)
        kinds: list[Mapping[str, Part]] = [found.plans, found.attentions, found.mlps, found.norms]
        modules = {module for kind in kinds for part in kind.values() for module in modules_of(part)}
        return cls(
            found,
            frozenset(prefix + module for module in modules),
            frozenset(prefix + linear for linear in found.linears - modules),
        )

    def install(
        self,
        body: Body,
        calls: Sequence[AttentionCall],
        layouts: Mapping[str, TensorLayout],
        dtype: torch.dtype,
        tp: TensorParallel,
        max_model_len: int,
        scheme_of: SchemeOf,
    ) -> dict[int, AnyAttention]:
        """Puts our layers in the body, whose buffers have values. -> their attention, by index of the layer."""
        in_body = _in_body(layouts, f"{body.path}.")
        names = {name: layout.pieces[0].checkpoint_name for name, layout in in_body.items() if layout.is_whole}
        modules = dict(body.module.named_modules())
        size = body.module.config.get_text_config().hidden_size

        def parts(scale: float) -> Parts:
            return Parts(names, modules, size, dtype, tp, scheme_of, scale)

        self._body = fuse(body.module, self.recognised, calls, parts, lambda index, plan: index)
        self._angles = [self._table(modules, *rotary, max_model_len) for rotary in self._body.rotaries]
        return self._body.attentions

    def counted(self) -> tuple[dict[str, int], list[str]]:
        """How many parts are ours, and why the others are not."""
        found = self.recognised
        counts = {
            "layers": len(found.plans),
            "attentions": len(found.attentions),
            "mlps": len(found.mlps),
            "norms": len(found.norms),
        }
        reasons = list(found.reasons.values())
        for layer in found.layers:  # what is the same in every layer is said once
            reasons = [reason.replace(f"{layer}.", "").replace(layer, "a layer") for reason in reasons]
        return counts, list(dict.fromkeys(reasons))

    def weights(self) -> dict[str, list[Weight]]:
        """By the name in the body of the module in whose place they are."""
        modules = self._body.modules.items()
        return {path: [weight for layer in one.weighted() for weight in layer.weights()] for path, one in modules}

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Without the modules, by name in the body, that are not kept."""
        self._body.modules = {path: module for path, module in self._body.modules.items() if is_kept(path)}

    def bind(self, tensors: SeenTensors, updatable: bool, is_tapped: bool) -> None:
        """Pops the tensors of our layers, and has everything else on their device, or that of the others. is_tapped:
        the stream is read between layers."""
        for layer in self._body.weighted():
            layer.bind(tensors, updatable)
        device = tensors.device
        self._body.bind_device(device)
        layers = [
            module for path in self.recognised.layers if isinstance(module := self._body.modules.get(path), FusedLayer)
        ]
        if layers and len(layers) == len(self.recognised.layers) and not is_tapped:
            layers[0].begin_with(layers[1:])
        self._rotaries = []
        for angles in self._angles:
            table = RotaryTable()
            table.bind_table(angles, device)
            self._rotaries.append(table)
        self._angles = []

    def refresh(self) -> None:
        for layer in self._body.weighted():
            layer.refresh()

    def rotations(self, positions: torch.Tensor) -> list[Rotation]:
        """positions: [n] int64. For `ForwardPass.rotations`."""
        return [rotary(positions) for rotary in self._rotaries]

    def _table(
        self, modules: Mapping[str, torch.nn.Module], plan: RotaryPlan | None, head_size: int, num_positions: int
    ) -> torch.Tensor:
        """[num_positions, head_size / 2] complex64, by the model's own rotary embedding in float32."""
        if plan is None:
            return torch.ones(num_positions, head_size // 2, dtype=torch.complex64)
        source = self.recognised.sources[plan.source]
        positions = torch.arange(num_positions)[None]

        def given(leaf: object) -> object:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if leaf.is_floating_point():
                return torch.zeros(1, num_positions, 1)
            return positions.expand(*leaf.shape[:-1], -1)  # of text, those of several axes are the same

        args, kwargs = tree_map(given, (source.args, dict(source.kwargs)))
        cos, sin = cosines_and_sines(modules[source.path](*args, **kwargs))
        return angle_table(cos[0], sin[0], plan, head_size)


def _in_body(layouts: Mapping[str, TensorLayout], prefix: str) -> dict[str, TensorLayout]:
    return {name.removeprefix(prefix): layout for name, layout in layouts.items() if name.startswith(prefix)}
