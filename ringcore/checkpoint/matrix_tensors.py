"""The tensors that a checkpoint holds for one matrix, as data: one in a dense checkpoint, several in a quantized one.

Written for a matrix of any size, and without torch: a checkpoint is checked by it before a worker starts, and the
worker's linear schemes slice by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

__all__ = ["BIAS", "DENSE", "AllInputs", "Axis", "Fixed", "Inputs", "MatrixTensor", "Outputs"]


@dataclass(frozen=True, slots=True)
class Outputs:
    """A dimension with one entry for every `per_entry` outputs: those packed in a word, or those that share a scale.

    is_shared: ranks whose shares cut an entry each hold all of it; otherwise such shares are refused.
    """

    per_entry: int = 1
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Inputs:
    """A dimension with one entry for every `per_entry` inputs. is_shared: as of `Outputs`."""

    per_entry: int = 1
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class AllInputs:
    """As `Inputs`, but every rank holds all entries: any input may refer to any of them."""

    per_entry: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """A dimension of `size` entries, whatever the matrix."""

    size: int


Axis = Outputs | Inputs | AllInputs | Fixed


@dataclass(frozen=True, slots=True)
class MatrixTensor:
    """One tensor of a matrix of num_outputs x num_inputs."""

    suffix: str  # the tensor's name is the matrix's, a dot, and this
    axes: tuple[Axis, ...]  # at most one `Outputs` and one `Inputs`
    dtype: str | None = None  # by safetensors' name; None: any float dtype, converted to the model's
    dummy: tuple[float, float] | None = None  # range of dummy weights; None: of variance 1 / num_inputs

    def shape(self, num_outputs: int, num_inputs: int) -> tuple[int, ...]:
        """In the checkpoint."""
        return tuple(_size(axis, num_outputs, num_inputs) for axis in self.axes)


def _size(axis: Axis, num_outputs: int, num_inputs: int) -> int:
    match axis:
        case Outputs(per_entry):
            return -(-num_outputs // per_entry)
        case Inputs(per_entry) | AllInputs(per_entry):
            return -(-num_inputs // per_entry)
        case Fixed(size):
            return size
        case _:
            assert_never(axis)


DENSE = (MatrixTensor("weight", (Outputs(), Inputs())),)
BIAS = MatrixTensor("bias", (Outputs(),), dummy=(-0.05, 0.05))  # the same in every scheme
