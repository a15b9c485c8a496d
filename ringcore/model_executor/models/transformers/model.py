"""A model of transformers as a `CausalLM`: its own modules over our attention, KV cache and collectives, and our layers
in place of those that compute the same."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext, TokenContext
from ringcore.attention.layer import AnyAttention, Attention
from ringcore.checkpoint import TensorIndex, TransformersSpec
from ringcore.checkpoint.quantization import Quantization
from ringcore.distributed.parallel import ONLY_STAGE, Stage, TensorParallel
from ringcore.model_executor.arithmetic import FASTEST, Arithmetic
from ringcore.model_executor.layers.expert_slots import ExpertSlots
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.models.base import CausalLM
from ringcore.model_executor.models.draft_head import DraftHead
from ringcore.model_executor.models.transformers.attention_calls import (
    AttentionCall,
    record,
    record_masked,
    shared_kv,
)
from ringcore.model_executor.models.transformers.attention_layers import attention_layers
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.checkpoint_layout import TensorLayout, read_layouts
from ringcore.model_executor.models.transformers.construction import make_buffers, module_of, on_meta
from ringcore.model_executor.models.transformers.experts import EXPERTS, Experts
from ringcore.model_executor.models.transformers.fusion.forward_pass import ForwardPass
from ringcore.model_executor.models.transformers.fusion.fused_model import Fusion
from ringcore.model_executor.models.transformers.handed_down import handed_down
from ringcore.model_executor.models.transformers.head import check_head, head_of, logits_of
from ringcore.model_executor.models.transformers.linears import ParallelLinear, take_part, use_products
from ringcore.model_executor.models.transformers.mixtures import Mixtures
from ringcore.model_executor.models.transformers.needs import Need
from ringcore.model_executor.models.transformers.packed_vocabulary import PackedHead, PackedVocabulary
from ringcore.model_executor.models.transformers.quantized_linears import dense_names, replace_quantized
from ringcore.model_executor.models.transformers.refusal import Refused, refusals_of
from ringcore.model_executor.models.transformers.routers import Routers
from ringcore.model_executor.models.transformers.stages import LayerChain, StagedBody, read_chain
from ringcore.model_executor.models.transformers.taps import tap_layers
from ringcore.model_executor.models.transformers.tensor_parallel import Share, shard, weights_of
from ringcore.model_executor.models.transformers.text_part import keep_text
from ringcore.model_executor.threads import one_thread
from ringcore.model_executor.weight import SeenTensors, Tensors, Weight
from ringcore.protocol.model_report import ModelReport

__all__ = ["TransformersModel"]

_ATTENTION = "ringcore"  # the name of our attention in transformers' interface
_log = logging.getLogger(__name__)


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_size]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_size]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, v_head_size]
    attention_mask: torch.Tensor | None,
    *,
    ringcore: ForwardPass | None = None,
    s_aux: torch.Tensor | None = None,  # [num_heads], sinks
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """-> [1, num_tokens, num_heads, v_head_size]."""
    given: ForwardPass = handed_down(ringcore, attention_mask)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return given.layers[module](q, k, v, given.ctx, s_aux)[None], None


AttentionInterface.register(_ATTENTION, _attention)


class TransformersModel(CausalLM):
    def __init__(
        self,
        spec: TransformersSpec,
        tp: TensorParallel,
        dtype: torch.dtype,
        max_model_len: int,
        scheme_of: SchemeOf,
        stage: Stage = ONLY_STAGE,
        expert_parallel: bool = False,
        redundant_experts: int | None = None,
        arithmetic: Arithmetic = FASTEST,
    ) -> None:
        """Raises `ModelLoadError` with the reason why the model cannot be computed here."""
        # Out of inference mode, in which a dispatch mode sees operations before they are decomposed.
        self._spec, self.stage, self._expert_parallel = spec, stage, expert_parallel and tp.size > 1
        self._redundant_experts, self._tiles = redundant_experts, arithmetic.tiles
        with refusals_of(spec), torch.inference_mode(False), torch.no_grad(), one_thread():
            self._build(spec, tp, dtype, max_model_len, arithmetic.schemes(scheme_of))

    def _build(
        self, spec: TransformersSpec, tp: TensorParallel, dtype: torch.dtype, max_model_len: int, scheme_of: SchemeOf
    ) -> None:
        model, num_positions = on_meta(spec, dtype), spec.max_position_embeddings
        self._body = body = Body(model)
        self._left_out = keep_text(body, num_positions)
        num_layers = spec.num_layers - body.num_unread_layers
        whole = record(body, num_positions)
        _check_calls(whole, num_layers)
        shared = shared_kv(body, num_positions) if any(call.kv_source is not None for call in whole) else {}
        calls = record_masked(body, num_positions)
        self._routers = Routers(model, dtype, lambda: record(body, num_positions))
        self._mixtures = Mixtures(model, self._routers.paths, spec.hidden_size)
        layouts = read_layouts(model, dense_names(TensorIndex(spec.weight_files), spec.quantization))
        self._fusion = Fusion.of(body, calls, layouts, dtype, tp.size, num_positions)
        layers = self._fusion.recognised.layers
        chain = read_chain(body, layers, num_layers, num_positions) if self.stage.size > 1 else None
        vocabulary = PackedVocabulary.of(model, layouts, spec.quantization)
        replaced = self._fusion.replaced | vocabulary.replaced
        shares = self._split(model, layouts, tp, spec.quantization, replaced)
        on_rank = whole if tp.size == 1 else record(body, num_positions)
        make_buffers(model)
        ours = self._fusion.install(body, calls, layouts, dtype, tp, max_model_len, scheme_of)
        self.vocab_size, self.hidden_size, self._num_attention_layers = spec.vocab_size, spec.hidden_size, len(whole)
        self._attend_by(on_rank, attention_layers(calls, on_rank, tp.size, ours, shared))
        is_plain = check_head(head_of(body), model.get_output_embeddings(), spec.hidden_size, spec.vocab_size)
        linears = replace_quantized(model, layouts, replaced, spec.quantization, tp, dtype, scheme_of)
        self._quantized = vocabulary.install(model, spec.quantization, tp, dtype, scheme_of) | linears
        use_products(model, self._fusion.linears, tp)
        self._model, self._head = model, head_of(body)
        self._plain_head = model.get_output_embeddings() if is_plain else None
        take_part(model, tp)
        model.config._attn_implementation = _ATTENTION
        self._own_weights = _weights(layouts, shares, replaced | linears.keys())
        self._staged: StagedBody | None = None
        self.elsewhere: list[Weight] = [weight for layout in layouts.values() for weight in layout.elsewhere()]
        if chain is not None:
            self._take_stage(body, chain, dtype)
        _log.info("%s by transformers: %s", spec.model_type, self.report())

    def _attend_by(self, calls: Sequence[AttentionCall], layers: Sequence[AnyAttention]) -> None:
        self.attention_layers = [layer for index, layer in enumerate(layers) if layer.index == index]
        of_calls = zip(calls, layers, strict=True)
        self._layers = {call.module: layer for call, layer in of_calls if isinstance(layer, Attention)}

    def _split(
        self,
        model: PreTrainedModel,
        layouts: dict[str, TensorLayout],
        tp: TensorParallel,
        quantization: Quantization | None,
        replaced: Container[str],
    ) -> Mapping[str, Share]:
        """Leaves the model this rank's share of what is not replaced."""
        self._experts = Experts(model, quantization)
        self._experts.store(layouts)
        if tp.size > 1:
            self._experts.split(layouts, tp, self._expert_parallel, self._redundant_experts)
        self._experts.pack(layouts)
        if tp.size == 1:
            return {}
        return shard(model, layouts, tp.detached(), replaced)

    def _take_stage(self, body: Body, chain: LayerChain, dtype: torch.dtype) -> None:
        fused = {f"{body.path}.{path}": weights for path, weights in self._fusion.weights().items()}
        weights = {weight.name: [weight] for weight in self._own_weights} | fused
        weights |= {f"{path}.weight": one.layer.weights() for path, one in self._quantized.items()}
        self._staged = staged = StagedBody(body, chain, self.stage, weights)
        self.elsewhere += [one for name, of_name in weights.items() if not staged.has(name) for one in of_name]
        self._own_weights = [weight for weight in self._own_weights if staged.has(weight.name)]
        self._quantized = {path: one for path, one in self._quantized.items() if staged.has(f"{path}.weight")}
        self._fusion.keep(lambda path: staged.has(f"{body.path}.{path}"))
        self.attention_layers = [layer for layer in self.attention_layers if layer.index in staged.own]
        staged.install(dtype)

    def attach(self, head: DraftHead) -> None:
        """See `CausalLM`. Raises `ModelLoadError` for a model whose hidden states cannot be read."""
        with refusals_of(self._spec):
            tap_layers(self._body, self._fusion.recognised.layers, self._num_attention_layers, head)
        self.draft_head = head
        self.attention_layers = [*self.attention_layers, head.attention]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See `CausalLM`."""
        rows: torch.Tensor = self._model.get_input_embeddings()(input_ids)
        return rows

    @property
    def has_plan(self) -> bool:
        """Whether the model says how its linears are split over ranks."""
        return bool(self._model.tp_plan)

    def report(self) -> ModelReport:
        counts, reasons = self._fusion.counted()
        of_mixtures = len(self._experts), len(self._routers), len(self._mixtures)
        counts |= {name: n for name, n in zip(("experts", "routers", "mixtures"), of_mixtures, strict=True) if n}
        return ModelReport("transformers", self._num_attention_layers, counts, [*reasons, *self._experts.reasons()])

    def weights(self) -> Sequence[Weight]:
        of_ours = [*self._fusion.weights().values(), *(one.layer.weights() for one in self._quantized.values())]
        own = (self._experts.declared(weight) for weight in self._own_weights)
        return [*own, *(weight for one in of_ours for weight in one)]

    @property
    def expert_slots(self) -> Sequence[ExpertSlots]:
        return self._experts.slots

    def may_ignore(self, checkpoint_name: str) -> bool:
        """Also what transformers leaves out by its model class (layers that only predict several tokens at once), and
        the tensors of the parts that are left out here."""
        return super().may_ignore(checkpoint_name) or checkpoint_name in self._left_out

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        seen = SeenTensors(tensors)
        for weight in self._own_weights:
            module, leaf = module_of(self._model, weight.name)
            tensor = seen.pop(weight.name)
            if leaf in module._parameters:
                empty = module._parameters[leaf]
                assert empty is not None, weight
                module._parameters[leaf] = nn.Parameter(tensor.view(empty.shape), requires_grad=False)
            else:
                module._buffers[leaf] = tensor
        for quantized in self._quantized.values():
            quantized.layer.bind(seen, updatable)
        self._fusion.bind(seen, updatable, is_tapped=self.draft_head is not None)
        device = seen.device
        for name, source in self._model.all_tied_weights_keys.items():
            is_elsewhere = self._staged is not None and not self._staged.ties(name, source)
            if is_elsewhere or name.removesuffix(".weight") in self._quantized:
                continue
            module, leaf = module_of(self._model, name)
            module._parameters[leaf] = self._model.get_parameter(source)
        for module in self._model.modules():
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = None if buffer is None else buffer.to(device)
        for linear in self._linears():
            is_head = linear is self._model.get_output_embeddings()
            linear.bind(updatable, prefers_float32=is_head, tiles=self._tiles)
        self._experts.bind(self._expert_parallel, self._tiles)
        self._routers.bind()
        self._mixtures.bind()
        self._model.config._experts_implementation = EXPERTS

    def refresh(self) -> None:
        self._fusion.refresh()
        for quantized in self._quantized.values():
            quantized.layer.refresh()
        for linear in self._linears():
            linear.refresh()

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """See `CausalLM`."""
        given, ids = ForwardPass(ctx, self._layers, self._fusion.rotations(positions)), inputs
        if not self.stage.is_first:
            given.received, ids = inputs, torch.zeros_like(positions)
        hidden = self._body(ids, positions, given)
        if self.draft_head is not None:
            self.draft_head.tap(self._num_attention_layers + 1, hidden)
        if self.stage.is_last:
            return hidden
        assert given.left is not None
        return given.left

    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, tokens: TokenContext = NO_TOKEN_CONTEXT
    ) -> torch.Tensor:
        """hidden: [n, hidden_size] -> logits [n, vocab_size], float32, equal on every rank; in `out` where given.
        tokens: nothing here depends on it."""
        if out is not None and isinstance(self._plain_head, ParallelLinear | PackedHead):
            return self._plain_head.write(hidden, out)
        logits = logits_of(self._head, hidden)
        return logits.float().contiguous() if out is None else out.copy_(logits)

    def _linears(self) -> Iterator[ParallelLinear]:
        return (module for module in self._model.modules() if isinstance(module, ParallelLinear))


def _check_calls(calls: Sequence[AttentionCall], num_layers: int) -> None:
    """Raises `Refused` where the KV cache does not hold all that a later token needs."""
    if len(calls) != num_layers:
        reason = f"it has {len(calls)} attention calls in {num_layers} layers, and the others have another state"
        raise Refused(reason, Need.REQUEST_STATE if len(calls) < num_layers else Need.ONE_CALL)
    if len({call.module for call in calls}) != num_layers:
        raise Refused("a layer is computed more than once", Need.ONE_CALL)


def _weights(
    layouts: Mapping[str, TensorLayout], shares: Mapping[str, Share], replaced: Collection[str]
) -> list[Weight]:
    """Of the tensors that are where transformers has them."""
    weights = []
    for name, layout in layouts.items():
        path, _, leaf = name.rpartition(".")
        if path in replaced or name in replaced:
            continue
        if path not in shares:
            weights.append(layout.weight())
        elif leaf == "weight":
            weights += weights_of(shares[path], layout, layouts.get(f"{path}.bias"))
    return weights
