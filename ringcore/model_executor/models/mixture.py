"""A mixture of experts in the place of an MLP: a router, and the experts that it chooses for each token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch

from ringcore.checkpoint.expected_tensors import EXPERT_MATRICES, expert_matrix
from ringcore.checkpoint.model_spec import ExpertsSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.kernels.linears.packed_weight import BLOCK, Fp8Blocks, PackedWeight
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import (
    ExpertMatrices,
    ExpertWeight,
    RouterForm,
    Routing,
    route_reference,
)
from ringcore.model_executor import ops
from ringcore.model_executor.arithmetic import FASTEST, Arithmetic
from ringcore.model_executor.expert_schemes.concatenated import concatenated
from ringcore.model_executor.expert_schemes.stacked import ExpertStack, shares_products, stacked_scheme
from ringcore.model_executor.layers.expert_slots import ExpertSlots, SlotTensor
from ringcore.model_executor.layers.experts import BoundExperts
from ringcore.model_executor.layers.norm import AnyNorm
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice
from ringcore.model_executor.models.decoder_layer import LayerInputs, Sublayer
from ringcore.model_executor.residual import NormedRows, Residual
from ringcore.model_executor.weight import Tensors, Uniform, Weight, WeightedLayer, WeightPart

__all__ = ["Experts", "Mixture", "Router"]


class Router(WeightedLayer):
    """The largest probabilities of a softmax over all experts, whole on every rank."""

    def __init__(
        self,
        name: str,
        checkpoint_name: str,
        spec: ExpertsSpec,
        hidden_size: int,
        dtype: torch.dtype,
        arithmetic: Arithmetic = FASTEST,
    ) -> None:
        self._form = RouterForm(spec.num_experts_per_tok, spec.norm_topk_prob)
        shape = (spec.num_experts, hidden_size)
        part = WeightPart(f"{checkpoint_name}.weight", shape, 0, 0, spec.num_experts)
        self._declared = Weight(f"{name}.weight", shape, dtype, (part,), Uniform.of_fan_in(hidden_size))
        self._arithmetic = arithmetic
        self._weight: torch.Tensor
        self._route: Callable[[NormedRows], Routing]

    @property
    def plain(self) -> tuple[torch.Tensor, RouterForm] | None:
        """The matrix [num_experts, hidden_size] and how experts are chosen, where any kernel may do it; None: the
        choice is batch-invariant."""
        return None if self._arithmetic.is_batch_invariant else (self._weight, self._form)

    def weights(self) -> list[Weight]:
        return [self._declared]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        self._weight = weight = tensors.pop(self._declared.name)
        if ops.has_kernels(weight.device):
            self._route = self._arithmetic.router(weight, self._form)
        else:
            route = self._arithmetic.route(lambda x: route_reference(x, weight, self._form))
            self._route = lambda x: route(x.rows)

    def __call__(self, x: NormedRows) -> Routing:
        """x: [n, hidden_size]."""
        return self._route(x)


class Experts(WeightedLayer):
    """The experts of a layer on one rank: a share of each, or whole ones, as one tensor for gate and up and one for
    down, in which the checkpoint's matrices are stacked."""

    def __init__(
        self,
        name: str,
        checkpoint_name: str,
        spec: ExpertsSpec,
        hidden_size: int,
        dtype: torch.dtype,
        tp: TensorParallel,
        expert_parallel: bool,
        scheme_of: SchemeOf,
        redundant_experts: int | None = None,
        arithmetic: Arithmetic = FASTEST,
    ) -> None:
        """checkpoint_name: of the mixture. redundant_experts: see `ExpertSlots`. Raises `ModelLoadError` for experts
        that are not quantized alike."""
        self._tp, self._hidden, self._dtype, self._spec = tp, hidden_size, dtype, spec
        self._arithmetic = arithmetic
        self._names = name, checkpoint_name
        num_shares = 1 if expert_parallel else tp.size
        assert spec.intermediate_size % num_shares == 0, (spec, tp.size)
        self._size = spec.intermediate_size // num_shares
        self._start = tp.rank * self._size if num_shares > 1 else 0
        self.slots = ExpertSlots(spec.num_experts, tp, redundant_experts) if expert_parallel else None
        all_matrices = itertools.product(range(spec.num_experts), EXPERT_MATRICES)
        names = (expert_matrix(checkpoint_name, expert, matrix) for expert, matrix in all_matrices)
        self._scheme = stacked_scheme(names, scheme_of)
        self._matrices: ExpertMatrices
        self._bound: BoundExperts

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Gate and up [num_experts, 2 * intermediate_size, hidden_size], and down [num_experts, hidden_size,
        intermediate_size], where any kernel may multiply them; None: they are quantized, over ranks, or the products
        batch-invariant."""
        up, down = self._matrices.up, self._matrices.down
        if not self._are_whole or not isinstance(up, DenseExperts) or not isinstance(down, DenseExperts):
            return None
        return up.stored, down.stored

    @property
    def fp8_blocks(self) -> tuple[Fp8Blocks, Fp8Blocks] | None:
        """As `dense`, of FP8: codes in its shapes, scales of the experts one after the other."""
        up, down = (self._fp8_blocks_of(weight) for weight in (self._matrices.up, self._matrices.down))
        return None if not self._are_whole or up is None or down is None else (up, down)

    @staticmethod
    def _fp8_blocks_of(weight: ExpertWeight) -> Fp8Blocks | None:
        if weight.row_group != BLOCK or not isinstance(stored := weight.stored, PackedWeight):
            return None
        blocks = stored.fp8_blocks
        return None if blocks is None else blocks._replace(codes=blocks.codes.view(weight.shape))

    @property
    def _are_whole(self) -> bool:
        """Whether all are here, and stay, for any kernel to multiply."""
        return not self._arithmetic.is_batch_invariant and self._tp.size == 1 and self.slots is None

    @property
    def _own(self) -> Sequence[int]:
        return range(self._spec.num_experts) if self.slots is None else self.slots.own

    def weights(self) -> Sequence[Weight]:
        return self._weights(self._own)

    def elsewhere(self) -> Sequence[Weight]:
        """All experts where each is on some ranks only: which are here may change."""
        return [] if self.slots is None else self._weights(range(self._spec.num_experts))

    def _weights(self, experts: Sequence[int]) -> list[Weight]:
        """Of gate and up, and of down."""
        return [weight for stacks in self._stacks(experts) for one in stacks for weight in one.weights().values()]

    def _stacks(self, experts: Sequence[int]) -> tuple[list[ExpertStack], list[ExpertStack]]:
        """Those of gate and up side by side; that of down."""
        *inner, outer = EXPERT_MATRICES
        together = [inner] if shares_products(self._scheme) else [[matrix] for matrix in inner]
        return [self._stack(experts, matrices) for matrices in together], [self._stack(experts, [outer], is_down=True)]

    def _stack(self, experts: Sequence[int], matrices: Sequence[str], is_down: bool = False) -> ExpertStack:
        (layer, mixture), size = self._names, self._spec.intermediate_size
        name = f"{layer}.{'_'.join(matrix.removesuffix('_proj') for matrix in matrices)}_proj"
        total, start, length = (self._hidden, 0, self._hidden) if is_down else (size, self._start, self._size)
        inputs = InputSlice(size, self._start, self._size) if is_down else InputSlice.whole(self._hidden)
        over_ranks = self._max_over_ranks if is_down and self._size < size else None

        def shard(expert: int) -> LinearShard:
            names = (expert_matrix(mixture, expert, matrix) for matrix in matrices)
            outputs = tuple(OutputSlice(one, total, start, length) for one in names)
            return LinearShard(name, outputs, inputs, self._dtype, max_over_ranks=over_ranks)

        return ExpertStack(name, self._scheme, tuple(map(shard, experts)))

    def _max_over_ranks(self, maxima: torch.Tensor) -> torch.Tensor:
        return self._tp.all_gather_last_dim(maxima).amax(-1, keepdim=True)

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        of_slots: list[SlotTensor] = []
        are_moved = self.slots is not None and self.slots.is_balanced
        up, down = (
            self._bound_weight(stacks, tensors, updatable or are_moved, of_slots) for stacks in self._stacks(self._own)
        )
        if self.slots is not None:
            self.slots.bind(up.device, of_slots if are_moved else [], self.refresh)
        self._matrices = ExpertMatrices(up, down, first=0 if self.slots is None else self.slots.first)
        self._bound = BoundExperts(
            self._matrices,
            self._arithmetic.expert_gate,
            self._tp,
            slots=self.slots,
            tiles=self._arithmetic.tiles,
            is_batch_invariant=self._arithmetic.is_batch_invariant,
        )

    def _bound_weight(
        self, stacks: Sequence[ExpertStack], tensors: Tensors, updatable: bool, of_slots: list[SlotTensor]
    ) -> ExpertWeight:
        pieces = []
        for stack in stacks:
            declared = stack.weights()
            bound = {suffix: tensors.pop(weight.name) for suffix, weight in declared.items()}
            of_slots += [SlotTensor(bound[suffix], weight.arrangement) for suffix, weight in declared.items()]
            pieces.append(stack.bound(bound, updatable))
        return self._arithmetic.expert_weight(concatenated(pieces))

    def refresh(self) -> None:
        self._matrices.up.refresh()
        self._matrices.down.refresh()

    def __call__(self, x: NormedRows, routing: Routing) -> torch.Tensor:
        """x: [n, hidden_size] -> the weighted sum over the experts of each token: [n, hidden_size], equal on every
        rank."""
        return self._bound(x, routing)

    def add_to(self, stream: Residual, x: NormedRows, routing: Routing) -> None:
        """stream [n, hidden_size] += self(x, routing)."""
        self._bound.add_to(stream, x, routing)


class Mixture(Sublayer):
    def __init__(self, router: Router, experts: Experts) -> None:
        self.router, self.experts = router, experts

    def layers(self) -> list[WeightedLayer]:
        return [self.router, self.experts]

    def __call__(self, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        x = NormedRows(hidden, norm)
        return self.experts(x, self.router(x))

    def add_to(self, stream: Residual, norm: AnyNorm, hidden: Residual, inputs: LayerInputs) -> None:
        x = NormedRows(hidden, norm)
        routing = self.router(x)  # its norm takes a deferred add, which reading the stream first would launch by itself
        self.experts.add_to(stream, x, routing)
