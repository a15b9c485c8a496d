"""The experts of a model of transformers by our experts function, whole or split over ranks.

transformers calls the experts of every mixture through one interface, in which this function is registered. Dense
tensors stay those of its modules, so the checkpoint's layout, dummy weights, sleep and updates know no difference;
quantized ones are buffers of the same modules, by the names that the checkpoint has for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ringcore.checkpoint.quantization import Quantization
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.kernels.mixtures.expert_matrices import ExpertMatrices, ExpertWeight, Routing
from ringcore.model_executor.expert_schemes.dense import DenseScheme
from ringcore.model_executor.expert_schemes.scheme import ExpertsScheme
from ringcore.model_executor.expert_schemes.schemes import experts_scheme
from ringcore.model_executor.layers.expert_slots import ExpertSlots, SlotTensor
from ringcore.model_executor.layers.experts import BoundExperts
from ringcore.model_executor.linear_schemes.searched_scheme import SearchedTiles
from ringcore.model_executor.models.transformers.checkpoint_layout import Ranges, TensorLayout
from ringcore.model_executor.models.transformers.expert_forms import form_of, is_experts
from ringcore.model_executor.models.transformers.expert_shares import (
    BIASES,
    ExpertShare,
    shares_of_each,
    slots_of,
    whole_experts,
)
from ringcore.model_executor.models.transformers.packed_experts import in_blocks_of_file
from ringcore.model_executor.models.transformers.refusal import Refused
from ringcore.model_executor.residual import NormedRows, Residual
from ringcore.model_executor.weight import CHECKPOINT_DTYPES, Weight

__all__ = ["EXPERTS", "Experts"]

EXPERTS = "ringcore"  # the name of our function in transformers' interface


def _experts(
    module: Any,
    hidden_states: torch.Tensor,  # [num_tokens, hidden_size]
    top_k_index: torch.Tensor,  # [num_tokens, k]
    top_k_weights: torch.Tensor,  # [num_tokens, k]
) -> torch.Tensor:
    bound: BoundExperts = module.ringcore
    rows = hidden_states.to(bound.matrices.up.dtype).contiguous()
    return bound(NormedRows(Residual(rows)), Routing(top_k_index, top_k_weights)).to(hidden_states.dtype)


ExpertsInterface.register(EXPERTS, _experts)


class Experts:
    """Of all modules of a model that transformers computes through its interface."""

    def __init__(self, model: PreTrainedModel, quantization: Quantization | None = None) -> None:
        """model: on meta, with the layers of all stages."""
        self._quantization, self._format = quantization, None if quantization is None else quantization.experts
        self._modules: dict[str, Any] = {name: one for name, one in model.named_modules() if is_experts(one)}
        self._forms = {name: form_of(module) for name, module in self._modules.items()}
        self._tp: dict[str, TensorParallel] = {}  # of those that are split
        self._slots: dict[str, ExpertSlots] = {}  # of whole experts
        self._layouts: dict[str, TensorLayout] = {}  # of these, by the name of a tensor
        self._packed: dict[str, ExpertsScheme] = {}  # of those in blocks of a GGUF file, by the name of the matrix
        self._expanded: Counter[str] = Counter()  # matrices of such a file, by the reason why they are not

    def __len__(self) -> int:
        return len(self._forms)

    def reasons(self) -> list[str]:
        """Why some activations are not an epilogue of a product, and matrices of a GGUF file are not packed."""
        own = (self._modules[name] for name, form in self._forms.items() if form.gate is None)
        names = dict.fromkeys(type(module).__name__ for module in own)
        expanded = [f"{count} matrices of experts are expanded: {why}" for why, count in self._expanded.items()]
        return [*(f"{name} has an activation of its own between its products" for name in names), *expanded]

    def store(self, layouts: dict[str, TensorLayout]) -> None:
        """The layouts of quantized experts become those of the tensors that the checkpoint has in their place. Raises
        `Refused` where it has none, or the format does not fit their sizes."""
        if self._format is None:
            return
        if not self._modules:
            raise Refused("its experts are quantized, and it has none of transformers' interface")
        for name, module in self._modules.items():
            for leaf in (_up(module), _DOWN):
                layout = layouts.pop(f"{name}.{leaf}")
                if not layout.is_whole:
                    raise Refused(f"its experts are quantized, and {layout.name!r} is not one tensor of a checkpoint")
                layouts |= {stored.name: stored for stored in self._stored(module, leaf, layout)}

    def _stored(self, module: Any, leaf: str, layout: TensorLayout) -> Iterator[TensorLayout]:
        num_experts, *size = layout.shape
        num_outputs, num_inputs = reversed(size) if module.is_transposed else size
        checkpoint_name = next(iter(layout.tensors))
        scheme = self._scheme(module)
        for tensor in scheme.tensors:
            ExpertShare("inputs", ((0, num_inputs),)).ranges_of(tensor, layout.name)
            assert tensor.dtype is not None, tensor
            yield TensorLayout.of_one(
                f"{layout.name}{tensor.suffix}",
                f"{checkpoint_name}{tensor.suffix}",
                (num_experts, *tensor.shape(num_outputs, num_inputs)),
                CHECKPOINT_DTYPES[tensor.dtype],
                tensor.dummy,
                scheme.arrangement(tensor.suffix),
            )

    def split(
        self, layouts: dict[str, TensorLayout], tp: TensorParallel, expert_parallel: bool, redundant: int | None
    ) -> None:
        """Leaves this rank its share of the tensors, of which the layouts become those of the share: with
        expert_parallel whole experts, else a share of the intermediate size of each, where that divides and the
        activation may be split. redundant: see `ExpertSlots`. Raises `Refused` where experts cannot be divided over the
        ranks."""
        if expert_parallel and not self._forms:
            raise Refused("expert_parallel=True, and it has no experts of transformers' interface to split")
        for name, form in self._forms.items():
            module = self._modules[name]
            size = module.get_parameter(_DOWN).shape[1 if module.is_transposed else 2]
            if expert_parallel:
                self._slots[name] = slots_of(len(module.get_parameter(_DOWN)), tp, redundant)
                shares = whole_experts(_up(module), self._slots[name].own, module.has_bias)
            else:
                shares = shares_of_each(_up(module), size, module.has_gate, module.has_bias, form, tp)
            for leaf, share in shares.items():
                self._split(layouts, name, leaf, share)
            if shares:
                self._tp[name] = tp

    def _split(self, layouts: dict[str, TensorLayout], name: str, leaf: str, share: ExpertShare) -> None:
        module, is_bias = self._modules[name], leaf.endswith("_bias")
        for tensor in BIASES if is_bias else self._scheme(module).tensors:
            path = f"{name}.{leaf}{tensor.suffix}"
            layouts[path] = replace(layouts[path], share=share.ranges_of(tensor, path))
            if name in self._slots:
                self._layouts[path] = layouts[path]
        # What transformers' own code sees of it, also of quantized ones, which it does not read.
        (dense,), whole = BIASES if is_bias else DenseScheme(module.is_transposed).tensors, module.get_parameter(leaf)
        shape = share.ranges_of(dense, leaf).shape(whole.shape)
        module._parameters[leaf] = nn.Parameter(whole.new_empty(shape), False)

    def pack(self, layouts: dict[str, TensorLayout]) -> None:
        """After `split`: the layouts of experts of a GGUF file become those of its blocks, where there are kernels."""
        formats = self._quantization
        if formats is None or formats.method != "gguf":
            return
        for name, module in self._modules.items():
            for path in (f"{name}.{_up(module)}", f"{name}.{_DOWN}"):
                found = in_blocks_of_file(layouts[path], formats)
                if isinstance(found, str):
                    self._expanded[found] += 1
                    continue
                layouts.pop(path)
                of_blocks, self._packed[path] = found
                rows = {one.name: one for one in of_blocks}
                layouts |= rows
                if self._layouts.pop(path, None) is not None:
                    self._layouts |= rows

    def bind(self, expert_parallel: bool, tiles: SearchedTiles | None = None) -> None:
        """After the tensors of the modules are bound; those of other stages have none. tiles: what a search found."""
        for name, form in self._forms.items():
            module = self._modules[name]
            up, down = self._weight(name, _up(module)), self._weight(name, _DOWN)
            if up is None or down is None:
                continue
            tp = self._tp.get(name, SingleRank())
            slots = self._slots.get(name)
            adds_bias = expert_parallel or tp.rank == 0  # of outputs: one of the ranks whose outputs are summed
            up_bias = module.get_parameter(f"{_up(module)}_bias") if module.has_bias else None
            down_bias = module.get_parameter(f"{_DOWN}_bias") if module.has_bias and adds_bias else None
            matrices = ExpertMatrices(up, down, up_bias, down_bias, 0 if slots is None else slots.first)
            if slots is not None:
                slots.bind(up.device, self._slot_tensors(name), partial(self._moved, name, matrices))
            module.ringcore = BoundExperts(matrices, form.activate, tp, form.normalise, slots, tiles)

    @property
    def slots(self) -> list[ExpertSlots]:
        """Of this stage, where they may be placed anew."""
        return [one for name, one in self._slots.items() if one.is_balanced and "ringcore" in vars(self._modules[name])]

    def declared(self, weight: Weight) -> Weight:
        """A weight of the model, of the experts that the rank has now."""
        layout = self._layouts.get(weight.name)
        return weight if layout is None else layout.weight()

    def _slot_tensors(self, name: str) -> list[SlotTensor]:
        module = self._modules[name]
        layouts = {path: one for path, one in self._layouts.items() if path.rpartition(".")[0] == name}
        bound = module._parameters | module._buffers
        return [SlotTensor(bound[path.rpartition(".")[2]], one.arrangement) for path, one in layouts.items()]

    def _moved(self, name: str, matrices: ExpertMatrices) -> None:
        share = Ranges(0, tuple((expert, 1) for expert in self._slots[name].own))
        own = {path: one for path, one in self._layouts.items() if path.rpartition(".")[0] == name}
        self._layouts |= {path: replace(one, share=share) for path, one in own.items()}
        matrices.up.refresh()
        matrices.down.refresh()

    def _scheme(self, module: Any) -> ExpertsScheme:
        return experts_scheme(self._format, module.is_transposed)

    def _weight(self, name: str, leaf: str) -> ExpertWeight | None:
        """None where its tensors are not of this stage."""
        module = self._modules[name]
        scheme = self._packed.get(f"{name}.{leaf}") or self._scheme(module)
        bound = module._parameters | module._buffers
        tensors = {tensor.suffix: bound.get(f"{leaf}{tensor.suffix}") for tensor in scheme.tensors}
        if any(tensor is None or tensor.is_meta for tensor in tensors.values()):
            return None
        return scheme.weight(tensors, module.get_parameter(leaf).dtype)


_DOWN = "down_proj"


def _up(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"
