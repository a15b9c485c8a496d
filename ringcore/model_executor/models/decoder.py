"""The dense decoder that all families share: pre-norm, rotary attention over KV heads, a gated MLP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import ClassVar

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext, TokenContext
from ringcore.checkpoint import Family, ModelSpec
from ringcore.distributed.parallel import ONLY_STAGE, Stage, TensorParallel
from ringcore.model_executor.arithmetic import FASTEST, Arithmetic
from ringcore.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ringcore.model_executor.layers.expert_slots import ExpertSlots
from ringcore.model_executor.layers.norm import RMSNorm
from ringcore.model_executor.layers.rotary import RotaryEmbedding
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.models.base import CausalLM
from ringcore.model_executor.models.decoder_layer import DecoderLayer, LayerInputs
from ringcore.model_executor.models.draft_head import DraftHead
from ringcore.model_executor.models.int8_gemvs import agree_on_int8_gemv
from ringcore.model_executor.models.layer_builder import LayerBuilder
from ringcore.model_executor.models.mixture import Experts
from ringcore.model_executor.models.persistent_decoder import PersistentDecoder
from ringcore.model_executor.models.recorded_layers import RecordedLayers
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.stages import layers_of, total_bytes
from ringcore.model_executor.weight import SeenTensors, Tensors, Weight, WeightedLayer
from ringcore.protocol.model_report import ModelReport

__all__ = ["DenseDecoder"]


class DenseDecoder(CausalLM):
    """The whole model, or a stage of it; a family sets its record and, where a layer computes something else, composes
    its layers."""

    family: ClassVar[Family]

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        dtype: torch.dtype,
        max_model_len: int,
        scheme_of: SchemeOf,
        stage: Stage = ONLY_STAGE,
        expert_parallel: bool = False,
        redundant_experts: int | None = None,
        arithmetic: Arithmetic = FASTEST,
    ) -> None:
        tp = arithmetic.ranks(tp)
        self.hidden_size = size = spec.hidden_size
        self.vocab_size, self.stage = spec.vocab_size, stage
        expert_parallel = expert_parallel and tp.size > 1
        self.embed_tokens = VocabParallelEmbedding(
            "embed_tokens", "model.embed_tokens", spec.vocab_size, size, dtype=dtype, tp=tp, scheme_of=scheme_of
        )
        # Rounded as the model was trained: the root of 1152 is 34 in bfloat16.
        scale = float(torch.tensor(size**0.5).to(dtype))
        self._embedding_scale = scale if self.family.scaled_embeddings else None
        ropes = [spec.rope] if spec.sliding_rope is None else [spec.rope, spec.sliding_rope]
        self.rotaries = [RotaryEmbedding(spec.head_dim, rope, max_model_len) for rope in ropes]
        split = expert_parallel, redundant_experts, arithmetic
        layers = [
            self.build_layer(LayerBuilder(index, spec, tp, dtype, self.family, scheme_of, *split))
            for index in range(spec.num_layers)
        ]
        self.norm = RMSNorm("norm", "model.norm", size, spec.rms_norm_eps, dtype, plus_one=self.family.norm_plus_one)
        tied = self.embed_tokens if spec.tie_word_embeddings else None
        of_head = arithmetic.schemes(scheme_of)
        self.lm_head = ParallelLMHead(
            "lm_head", "lm_head", spec.vocab_size, size, dtype=dtype, tp=tp, tied=tied, scheme_of=of_head
        )
        self._num_ranks = tp.size
        self._recorded = RecordedLayers(self._run_layers, num_ranks=tp.size)
        self._persistent: PersistentDecoder | None = None
        self._between_taps: dict[int, RecordedLayers] = {}  # with a head that drafts, by their first layer
        self._take_stage(layers, [self.embed_tokens], [*([] if tied is None else [tied]), self.norm, self.lm_head])

    def _take_stage(
        self, layers: list[DecoderLayer], before: Sequence[WeightedLayer], after: Sequence[WeightedLayer]
    ) -> None:
        """Keeps the stage's layers. before, after: what the first and the last stage have besides; both have the
        embedding where the LM head shares its table."""
        of_layers = [layer.layers() for layer in layers]
        sizes = [total_bytes(_weights_of(one)) for one in of_layers]
        own = layers_of(self.stage, sizes, total_bytes(_weights_of(before)), total_bytes(_weights_of(after)))
        self.layers = layers[own.start : own.stop]
        self.attention_layers = [attention for layer in self.layers for attention in layer.attention_layers()]
        self._num_attention_layers = sum(len(layer.attention_layers()) for layer in layers)
        ends = before if self.stage.is_first else (), after if self.stage.is_last else ()
        # Each once; the embedding comes before the LM head that may share its table.
        self._weighted = list(dict.fromkeys([*ends[0], *chain(*of_layers[own.start : own.stop]), *ends[1]]))
        others = dict.fromkeys([*before, *chain(*of_layers), *after])
        self.elsewhere = _weights_of(one for one in others if one not in set(self._weighted))
        self.elsewhere += [weight for layer in chain(*of_layers) for weight in layer.elsewhere()]

    @property
    def expert_slots(self) -> Sequence[ExpertSlots]:
        found = (one.slots for one in self._weighted if isinstance(one, Experts))
        return [slots for slots in found if slots is not None and slots.is_balanced]

    def report(self) -> ModelReport:
        return ModelReport("native", self._num_attention_layers)

    def build_layer(self, build: LayerBuilder) -> DecoderLayer:
        """One layer: a family with other sublayers composes them here."""
        names = build.family.norms
        return DecoderLayer(
            build.norm("input_norm", names.input),
            build.post_normed(build.self_attention(), "attention_out_norm", names.attention_out),
            build.norm("mlp_norm", names.mlp),
            build.post_normed(build.mlp(), "mlp_out_norm", names.mlp_out),
        )

    def attach(self, head: DraftHead) -> None:
        self.draft_head = head
        self.attention_layers = [*self.attention_layers, head.attention]
        ends = sorted({0, *(tap for tap in head.taps if tap < len(self.layers)), len(self.layers)})
        runs = [(begin, partial(_run, self.layers[begin:end])) for begin, end in pairwise(ends)]
        self._between_taps = {begin: RecordedLayers(run, self._num_ranks) for begin, run in runs}

    def weights(self) -> list[Weight]:
        return _weights_of(self._weighted)

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops from `tensors` layer by layer, so that a weight and its packed copy coexist only briefly."""
        for recorded in (self._recorded, *self._between_taps.values()):
            recorded.forget()
        seen = SeenTensors(tensors)
        for layer in self._weighted:
            layer.bind(seen, updatable)
        device = seen.device
        for rotary in self.rotaries:
            rotary.bind(device)
        for decoder_layer in self.layers:
            decoder_layer.bind_device(device)
        agree_on_int8_gemv(self._weighted)
        self._persistent = PersistentDecoder.of(self.layers)
        assert not len(tensors), "a declared weight was not bound"

    def refresh(self) -> None:
        for layer in self._weighted:
            layer.refresh()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids: [n] int64 -> a new tensor [n, hidden_size], the input of the first layer."""
        return self.embed_tokens(input_ids, scale=self._embedding_scale)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """-> hidden states [num_tokens, hidden_size], normalised; see `CausalLM`."""
        layer_inputs = LayerInputs(ctx, [rotary(positions) for rotary in self.rotaries])
        # The residual stream is float32 whatever the dtype: each layer adds to it twice, and 16 bits would round it
        # each time. In a simulation of every rounding, SmolLM2's log-probabilities in bfloat16 are 0.0165 off in the
        # mean with a stream of bfloat16, and 0.0082 with this one.
        if self.stage.is_first:
            hidden = self.embed_tokens(inputs, torch.float32, self._embedding_scale)
        else:
            hidden = inputs.clone()
        return self._recorded(hidden, layer_inputs) if self.draft_head is None else self._tapped(hidden, layer_inputs)

    def _run_layers(self, hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
        if self._persistent is None or not self._persistent(hidden, inputs):
            for layer in self.layers:
                layer(hidden, inputs)
        return hidden.normed(self.norm) if self.stage.is_last else hidden.rows

    def _tapped(self, rows: torch.Tensor, inputs: LayerInputs) -> torch.Tensor:
        """As `_run_layers`, in runs of layers between those before which the head takes the residual stream."""
        head = self.draft_head
        assert head is not None
        for begin, layers in self._between_taps.items():
            head.tap(begin, rows)
            rows = layers(rows, inputs)
        head.tap(len(self.layers), rows)
        normed = Residual(rows).normed(self.norm)
        head.tap(len(self.layers) + 1, normed)
        return normed

    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, tokens: TokenContext = NO_TOKEN_CONTEXT
    ) -> torch.Tensor:
        """hidden: [n, hidden_size] -> logits [n, vocab_size], float32, complete and equal on every rank; in `out`,
        contiguous, where given. tokens: of the rows of `hidden`."""
        return self.lm_head(hidden, tokens, out)


def _run(layers: Sequence[DecoderLayer], hidden: Residual, inputs: LayerInputs) -> torch.Tensor:
    for layer in layers:
        layer(hidden, inputs)
    return hidden.rows


def _weights_of(layers: Iterable[WeightedLayer]) -> list[Weight]:
    return [weight for layer in layers for weight in layer.weights()]
