"""What a rank has of the experts of a module: a share of the intermediate size of each, or whole ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringcore.checkpoint.matrix_tensors import Inputs, MatrixTensor, Outputs
from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.layers.expert_slots import ExpertSlots
from ringcore.model_executor.models.transformers.checkpoint_layout import Ranges
from ringcore.model_executor.models.transformers.expert_forms import ExpertForm
from ringcore.model_executor.models.transformers.refusal import Refused

__all__ = ["BIASES", "ExpertShare", "shares_of_each", "slots_of", "whole_experts"]

BIASES = (MatrixTensor("", (Outputs(),)),)
_AXES = {"outputs": Outputs, "inputs": Inputs}


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Of one matrix of every expert, or of its bias: ranges of experts, or of the outputs or inputs of each."""

    along: Literal["experts", "outputs", "inputs"]
    ranges: tuple[tuple[int, int], ...]  # (start, length), one after the other

    def ranges_of(self, tensor: MatrixTensor, name: str) -> Ranges:
        """The same in entries of one of its tensors, [num_experts, ...]. Raises `Refused` where an entry is cut."""
        if self.along == "experts":
            return Ranges(0, self.ranges)
        dim, axis = next((dim, axis) for dim, axis in enumerate(tensor.axes, 1) if isinstance(axis, _AXES[self.along]))
        assert isinstance(axis, Outputs | Inputs), axis
        for start, length in self.ranges:
            if start % axis.per_entry or length % axis.per_entry:
                raise Refused(
                    f"a rank's share of {name!r} is {length} {self.along} from {start} on, and its scales are of "
                    f"{axis.per_entry} each; give expert_parallel=True, by which each rank has whole experts, or "
                    "another tensor_parallel_size"
                )
        return Ranges(dim, tuple((start // axis.per_entry, length // axis.per_entry) for start, length in self.ranges))


def slots_of(num_experts: int, tp: TensorParallel, num_redundant: int | None) -> ExpertSlots:
    """Raises `Refused` where the ranks would have different numbers of slots."""
    if (num_experts + (num_redundant or 0)) % tp.size:
        and_more = "" if num_redundant is None else f" and {num_redundant} redundant ones"
        raise Refused(
            f"its {num_experts} experts{and_more} do not divide over {tp.size} ranks; give expert_parallel=False, "
            "which splits each of them, or another redundant_experts or tensor_parallel_size"
        )
    return ExpertSlots(num_experts, tp, num_redundant)


def whole_experts(up: str, own: Sequence[int], has_bias: bool) -> dict[str, ExpertShare]:
    """By parameter of the module. up: the name of the first matrix; own: the rank's experts."""
    leaves = [up, "down_proj", *([f"{up}_bias", "down_proj_bias"] if has_bias else [])]
    return {leaf: ExpertShare("experts", tuple((expert, 1) for expert in own)) for leaf in leaves}


def shares_of_each(
    up: str, size: int, has_gate: bool, has_bias: bool, form: ExpertForm, tp: TensorParallel
) -> dict[str, ExpertShare]:
    """By parameter of the module; none where each expert stays whole, and every rank computes all of them. size: the
    intermediate size."""
    if not form.is_split or size % tp.size:
        return {}
    length = size // tp.size
    own = (tp.rank * length, length)
    if not has_gate:
        of_up: tuple[tuple[int, int], ...] = (own,)
    elif form.gate is not None and form.gate.is_interleaved:
        of_up = ((2 * own[0], 2 * length),)
    else:
        of_up = (own, (size + own[0], length))
    shares = {"down_proj": ExpertShare("inputs", (own,)), up: ExpertShare("outputs", of_up)}
    return shares | ({f"{up}_bias": ExpertShare("outputs", of_up)} if has_bias else {})
