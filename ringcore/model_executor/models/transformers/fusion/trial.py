"""Our layers with the weights of a sample pass, on one rank, in float32: what is compared is what will run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ringcore.attention.backend import AttentionBackend, LatentBackend, LatentUpProjection
from ringcore.attention.context import ForwardContext, GroupContext, TokenContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.distributed.parallel import SingleRank
from ringcore.kv_cache.spec import FullAttentionSpec, MLASpec
from ringcore.model_executor.layers.rotary import RotaryTable, Rotation
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.models.decoder_layer import DecoderLayer, Sublayer
from ringcore.model_executor.models.transformers.fusion.module_sublayer import ModuleInputs
from ringcore.model_executor.models.transformers.fusion.parts import Parts
from ringcore.model_executor.models.transformers.fusion.plan import AnyAttentionPlan, LatentPlan, RotaryPlan
from ringcore.model_executor.models.transformers.fusion.sample_pass import (
    Call,
    Heads,
    SampleLinear,
    SamplePass,
    attend,
    cosines_and_sines,
)
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["Trial", "agree", "angle_table"]

_NOTHING = np.zeros(1, np.int32)
_NO_METADATA = AttentionMetadata(0, 0, 0, 0, _NOTHING, _NOTHING, _NOTHING, torch.empty(0))  # there is no cache
_ANY = AttentionSpec(1, 1.0)
_TOLERANCE = 1e-4  # of the largest error against the root mean square; another order of sums gives some 1e-6


class Trial:
    """Compares our sublayers and layers with the recorded calls of a sample pass."""

    def __init__(self, sample: SamplePass, hidden_size: int) -> None:
        self._sample = sample
        self._modules = dict(sample.body.named_modules())
        self._linears = {name: m for name, m in self._modules.items() if isinstance(m, SampleLinear)}
        self._tensors = {name: tensor.detach() for name, tensor in sample.body.named_parameters()}
        self._hidden_size = hidden_size
        names = {name: name for name in self._tensors} | {f"{name}.weight": f"{name}.weight" for name in self._linears}
        self._names = names

    def parts(self, scale: float = 1.0) -> Parts:
        scheme = _SampleScheme(self._linears)
        return Parts(
            self._names,
            self._modules,
            self._hidden_size,
            torch.float32,
            SingleRank(),
            lambda checkpoint_name: scheme,
            scale,
        )

    def sublayer_agrees(self, sublayer: Sublayer, call: Call, rotations: list[Rotation]) -> bool:
        """call: of the model's sublayer, on hidden rows that nothing normalises here."""
        self.bind(sublayer.layers())
        sublayer.bind_device(torch.device("cpu"))
        norm = self.parts().prologue(None)
        ours = sublayer(norm, Residual(call.hidden[0].clone()), self._inputs(rotations, call))
        return agree(ours, call.result[0])

    def layer_agrees(self, layer: DecoderLayer, call: Call, rotations: list[Rotation], scale: float) -> bool:
        self.bind(layer.layers())
        layer.bind_device(torch.device("cpu"))
        before = call.hidden[0]
        stream = Residual(before / scale)
        layer(stream, self._inputs(rotations, call))
        return agree(stream.rows * scale - before, call.result[0] - before)

    def rotation(self, plan: RotaryPlan | None, head_size: int) -> Rotation:
        """Of the pass's tokens, by the angles that were computed for them."""
        num_tokens = self._sample.positions.shape[1]
        if plan is None:
            angles = torch.ones(num_tokens, head_size // 2, dtype=torch.complex64)
        else:
            cos, sin = cosines_and_sines(self._sample.rotaries[plan.source].output)
            angles = angle_table(cos[0], sin[0], plan, head_size)
        table = RotaryTable()
        table.bind_table(angles, torch.device("cpu"))
        return table(torch.arange(num_tokens))

    def bind(self, layers: Iterable[WeightedLayer]) -> None:
        for layer in layers:
            layer.bind(_SampleTensors(layer, self._tensors))

    def context(self) -> ForwardContext:
        """For attention of `index_of`."""
        heads = GroupContext(_NO_METADATA, _OneSequence(FullAttentionSpec(1, 1, 1, "float32"), [_ANY]), None)
        latents = GroupContext(_NO_METADATA, _OneSequenceOfLatents(MLASpec(1, 1, 1, "float32"), [_ANY]), None)
        return ForwardContext((heads, latents), {0: 0, 1: 1}, {0: torch.empty(0), 1: torch.empty(0)})

    def index_of(self, plan: AnyAttentionPlan) -> int:
        """The index by which attention finds what stands for its backend."""
        return int(isinstance(plan, LatentPlan))

    def _inputs(self, rotations: list[Rotation], call: Call) -> ModuleInputs:
        return ModuleInputs(self.context(), rotations, call.args, call.kwargs)


def angle_table(cos: torch.Tensor, sin: torch.Tensor, plan: RotaryPlan, head_size: int) -> torch.Tensor:
    """cos and sin: [n, any width], of each angle of a pair, perhaps several times -> [n, head_size / 2] complex64: the
    rotation of every pair; entries beyond those that are rotated stay as they are."""
    table = torch.ones(len(cos), head_size // 2, dtype=torch.complex64)
    pairs = torch.arange(plan.dim // 2) * plan.stride
    table[:, : plan.dim // 2] = torch.complex(cos[:, pairs].float(), sin[:, pairs].float())
    return table


def agree(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
    return bool((ours - theirs).abs().max() <= tolerance * theirs.square().mean().sqrt())


class _OneSequence(AttentionBackend):
    """The attention of a sample pass. Its masks and scores are plain: what else attention is asked for was recorded."""

    name = "sample"

    @classmethod
    def refusal(cls, *args: object) -> str | None:
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (0,)

    def plan(self, metadata: AttentionMetadata) -> object:
        return None

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: object,
        layer: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert key is not None, "keys are written by the backend"
        assert value is not None
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return attend(Heads(q, k, v, sinks), layer.scale)[0]


class _OneSequenceOfLatents(LatentBackend):
    """Likewise, with expanded heads: the matrix by which queries would be absorbed is no tensor."""

    name = "sample"

    @classmethod
    def refusal(cls, *args: object) -> str | None:
        return None

    def plan(self, metadata: AttentionMetadata) -> object:
        return None

    def write(self, rows: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        pass

    def forward(
        self,
        query: torch.Tensor,
        rows: torch.Tensor,
        up: LatentUpProjection,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        plan: object,
        layer: AttentionSpec,
    ) -> torch.Tensor:
        rope = query.shape[2] - up.qk_nope_head_dim
        key, value = up.expanded(rows[:, :-rope], slice(0, query.shape[1]))
        key = torch.cat((key, rows[:, None, -rope:].expand(-1, key.shape[1], -1)), 2)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return attend(Heads(q, k, v, None), layer.scale)[0]


@dataclass(frozen=True)
class _SampleScheme(LinearScheme):
    """The matrices of a sample pass, which are no tensors."""

    linears: Mapping[str, SampleLinear]

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return ()

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        return _SampleProduct(shard, self.linears, bias)


class _SampleProduct(Product):
    def __init__(self, shard: LinearShard, linears: Mapping[str, SampleLinear], bias: torch.Tensor | None) -> None:
        self._outputs, self._linears, self._bias = shard.outputs, linears, bias

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        names = dict.fromkeys(part.checkpoint_name for part in self._outputs)
        products, slices = {name: self._linears[name].product(x) for name in names}, []
        for part in self._outputs:
            rows = products[part.checkpoint_name][:, part.start : part.start + part.length]
            if part.order is not None:
                rows = rows.reshape(len(x), -1, len(part.order))[:, :, list(part.order)].flatten(1)
            slices.append(rows)
        product = torch.cat(slices, 1)
        return product if self._bias is None else product + self._bias


class _SampleTensors:
    """Fills a layer's tensors as a loader would, from those of the sample copy."""

    def __init__(self, layer: WeightedLayer, tensors: Mapping[str, torch.Tensor]) -> None:
        self._weights = {weight.name: weight for weight in layer.weights()}
        self._tensors = tensors

    def __len__(self) -> int:
        return len(self._weights)

    def pop(self, name: str, /) -> torch.Tensor:
        weight = self._weights.pop(name)
        filled = torch.zeros(weight.shape)
        for part, place in weight.places(filled):
            rows = self._tensors[part.checkpoint_name].narrow(part.dim, part.start, part.length)
            place.copy_(part.ordered(rows))
        return filled
