"""The experts of a model of transformers by our experts function, whole or split over ranks.

transformers calls the experts of every mixture through one interface, in which this function is registered. The tensors
stay those of its modules, so the checkpoint's layout, dummy weights, sleep and updates know no difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.kernels.expert_matrices import ExpertMatrices, Routing
from ringcore.model_executor.layers.experts import BoundExperts
from ringcore.model_executor.models.transformers.checkpoint_layout import Ranges, TensorLayout
from ringcore.model_executor.models.transformers.expert_forms import ExpertForm, form_of, is_experts
from ringcore.model_executor.models.transformers.refusal import Refused

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
    return bound(rows, Routing(top_k_index, top_k_weights)).to(hidden_states.dtype)


ExpertsInterface.register(EXPERTS, _experts)


class Experts:
    """Of all modules of a model that transformers computes through its interface."""

    def __init__(self, model: PreTrainedModel) -> None:
        """model: on meta, with the layers of all stages."""
        self._modules: dict[str, Any] = {name: one for name, one in model.named_modules() if is_experts(one)}
        self._forms = {name: form_of(module) for name, module in self._modules.items()}
        self._tp: dict[str, TensorParallel] = {}  # of those that are split

    def __len__(self) -> int:
        return len(self._forms)

    def reasons(self) -> list[str]:
        """Why some activations are not an epilogue of a product."""
        own = (self._modules[name] for name, form in self._forms.items() if form.gate is None)
        names = dict.fromkeys(type(module).__name__ for module in own)
        return [f"{name} has an activation of its own between its products" for name in names]

    def split(self, layouts: dict[str, TensorLayout], tp: TensorParallel, expert_parallel: bool) -> None:
        """Leaves this rank its share of the tensors, of which the layouts become those of the share: with
        expert_parallel whole experts, else a share of the intermediate size of each, where that divides and the
        activation may be split. Raises `Refused` where experts cannot be divided over the ranks."""
        if expert_parallel and not self._forms:
            raise Refused("expert_parallel=True, and it has no experts of transformers' interface to split")
        for name, form in self._forms.items():
            module = self._modules[name]
            shares = _whole_experts(module, tp) if expert_parallel else _shares_of_each(module, form, tp)
            for leaf, ranges in shares.items():
                layouts[f"{name}.{leaf}"] = replace(layouts[f"{name}.{leaf}"], share=ranges)
                whole = module.get_parameter(leaf)
                module._parameters[leaf] = nn.Parameter(whole.new_empty(ranges.shape(whole.shape)), False)
            if shares:
                self._tp[name] = tp

    def bind(self, expert_parallel: bool) -> None:
        """After the tensors of the modules are bound; those of other stages have none."""
        for name, form in self._forms.items():
            module = self._modules[name]
            if module.down_proj.device.type == "meta":
                continue
            tp = self._tp.get(name, SingleRank())
            first = tp.rank * len(module.down_proj) if expert_parallel else 0
            adds_bias = expert_parallel or tp.rank == 0
            module.ringcore = BoundExperts(_matrices(module, first, adds_bias), form.activate, tp, form.normalise)


def _up(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _matrices(module: Any, first: int, adds_bias: bool) -> ExpertMatrices:
    """adds_bias: of the outputs; False on a rank whose outputs are summed with those of one that adds it."""
    up_bias = module.get_parameter(f"{_up(module)}_bias") if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias and adds_bias else None
    return ExpertMatrices(
        module.get_parameter(_up(module)), module.down_proj, up_bias, down_bias, module.is_transposed, first
    )


def _whole_experts(module: Any, tp: TensorParallel) -> dict[str, Ranges]:
    num_experts = len(module.down_proj)
    if num_experts % tp.size:
        raise Refused(
            f"its {num_experts} experts do not divide over {tp.size} ranks; give expert_parallel=False, which splits "
            "each of them, or another tensor_parallel_size"
        )
    length = num_experts // tp.size
    leaves = [_up(module), "down_proj", *([f"{_up(module)}_bias", "down_proj_bias"] if module.has_bias else [])]
    return {leaf: Ranges(0, ((tp.rank * length, length),)) for leaf in leaves}


def _shares_of_each(module: Any, form: ExpertForm, tp: TensorParallel) -> dict[str, Ranges]:
    """None where each expert stays whole, and every rank computes all of them."""
    size = module.down_proj.shape[1 if module.is_transposed else 2]
    if not form.is_split or size % tp.size:
        return {}
    length = size // tp.size
    own = (tp.rank * length, length)
    if not module.has_gate:
        of_up: tuple[tuple[int, int], ...] = (own,)
    elif form.gate is not None and form.gate.is_interleaved:
        of_up = ((2 * own[0], 2 * length),)
    else:
        of_up = (own, (size + own[0], length))
    up, down = (2, 1) if module.is_transposed else (1, 2)
    shares = {_up(module): Ranges(up, of_up), "down_proj": Ranges(down, (own,))}
    return shares | ({f"{_up(module)}_bias": Ranges(1, of_up)} if module.has_bias else {})
