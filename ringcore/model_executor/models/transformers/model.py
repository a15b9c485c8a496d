"""A model of transformers as a `CausalLM`: its own modules and weights, our attention, KV cache and collectives."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext, TokenContext
from ringcore.attention.layer import Attention
from ringcore.checkpoint import TensorIndex, TransformersSpec
from ringcore.distributed.parallel import TensorParallel
from ringcore.errors import ModelLoadError
from ringcore.model_executor.models.base import CausalLM
from ringcore.model_executor.models.transformers.attention_calls import (
    RECORD,
    AttentionCall,
    Refused,
    in_one_line,
    record,
)
from ringcore.model_executor.models.transformers.checkpoint_layout import read_layouts
from ringcore.model_executor.models.transformers.construction import build_on_meta, make_buffers, module_of
from ringcore.model_executor.models.transformers.tensor_parallel import (
    ShardedEmbedding,
    ShardedLinear,
    shard,
    weights_of,
)
from ringcore.model_executor.weight import Tensors, Weight

__all__ = ["TransformersModel"]

_ATTENTION = "ringcore"  # the name of our attention in transformers' interface


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a forward pass tells its attention calls: an argument that the model hands down."""

    ctx: ForwardContext
    layers: Mapping[nn.Module, Attention]  # by the module that calls


def _attention(
    module: nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_size]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_size]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, v_head_size]
    attention_mask: None,
    *,
    ringcore: _Pass,
    s_aux: torch.Tensor | None = None,  # [num_heads], sinks
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """-> [1, num_tokens, num_heads, v_head_size]."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return ringcore.layers[module](q, k, v, ringcore.ctx, s_aux)[None], None


AttentionInterface.register(_ATTENTION, _attention)


class TransformersModel(CausalLM):
    def __init__(self, spec: TransformersSpec, tp: TensorParallel, dtype: torch.dtype, max_model_len: int) -> None:
        """Raises `ModelLoadError` with the reason why the model cannot be computed here."""
        try:
            # Out of inference mode, in which a dispatch mode sees operations before they are decomposed.
            with torch.inference_mode(False), torch.no_grad():
                self._build(spec, tp, dtype)
        except Refused as refusal:
            raise ModelLoadError(
                f"{spec.model_type}: {refusal}; this model cannot be served yet",
                architecture=spec.architecture,
                reason=str(refusal),
            ) from refusal

    def _build(self, spec: TransformersSpec, tp: TensorParallel, dtype: torch.dtype) -> None:
        model, num_positions = _on_meta(spec, dtype), spec.max_position_embeddings
        _check_calls(record(model, num_positions, has_positions=False), spec.num_layers)
        calls = record(model, num_positions, is_masked=True)
        layouts = read_layouts(model, list(TensorIndex(spec.weight_files)))
        shares = {} if tp.size == 1 else shard(model, layouts, tp.detached())
        on_rank = record(model, num_positions)
        self.vocab_size = spec.vocab_size
        self.attention_layers = _attention_layers(calls, on_rank, tp.size)
        self._layers = {call.module: layer for call, layer in zip(on_rank, self.attention_layers, strict=True)}
        self._model, self._body, self._head = model, model.base_model, _head_of(model)
        self._check_head(spec)
        for module in model.modules():
            if isinstance(module, ShardedLinear | ShardedEmbedding):
                module.tp = tp  # while the passes were recorded no other rank took part
        make_buffers(model)
        model.config._attn_implementation = _ATTENTION
        self._weights = []
        for name, layout in layouts.items():
            path, _, leaf = name.rpartition(".")
            if path not in shares:
                self._weights.append(layout.weight())
            elif leaf == "weight":
                self._weights += weights_of(shares[path], layout, layouts.get(f"{path}.bias"))

    @property
    def has_plan(self) -> bool:
        """Whether the model says how its linears are split over ranks."""
        return bool(self._model.tp_plan)

    def weights(self) -> Sequence[Weight]:
        return self._weights

    def may_ignore(self, checkpoint_name: str) -> bool:
        """Also what transformers leaves out by its model class: layers that only predict several tokens at once."""
        patterns = self._model._keys_to_ignore_on_load_unexpected
        return super().may_ignore(checkpoint_name) or any(re.search(one, checkpoint_name) for one in patterns)

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Nothing is derived from the tensors: updatable or not, the model computes from them."""
        for weight in self._weights:
            module, leaf = module_of(self._model, weight.name)
            tensor = tensors.pop(weight.name)
            if leaf in module._parameters:
                empty = module._parameters[leaf]
                assert empty is not None, weight
                module._parameters[leaf] = nn.Parameter(tensor.view(empty.shape), requires_grad=False)
            else:
                module._buffers[leaf] = tensor
            device = tensor.device
        for name, source in self._model.all_tied_weights_keys.items():
            module, leaf = module_of(self._model, name)
            module._parameters[leaf] = self._model.get_parameter(source)
        for module in self._model.modules():
            for leaf, buffer in module._buffers.items():
                module._buffers[leaf] = None if buffer is None else buffer.to(device)
        # The reference loops over the experts that were chosen, which asks for them on the host: not in a CUDA graph.
        self._model.config._experts_implementation = "eager" if device.type == "cpu" else "batched_mm"

    def refresh(self) -> None:
        pass

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """input_ids and positions: [num_tokens] int64 -> hidden states [num_tokens, hidden_size]."""
        out = self._body(
            input_ids=input_ids[None], position_ids=positions[None], use_cache=False, ringcore=_Pass(ctx, self._layers)
        )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None, tokens: TokenContext = NO_TOKEN_CONTEXT
    ) -> torch.Tensor:
        """hidden: [n, hidden_size] -> logits [n, vocab_size], float32, equal on every rank; in `out` where given.
        tokens: nothing here depends on it."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits.float().contiguous() if out is None else out.copy_(logits)

    def _check_head(self, spec: TransformersSpec) -> None:
        hidden = torch.empty(3, spec.hidden_size, dtype=self._model.config.dtype, device="meta")
        try:
            shape = tuple(self.compute_logits(hidden).shape)
        except Exception as error:  # whatever the model's own code raises
            raise Refused(f"its logits need more than the last hidden states: {in_one_line(error)}") from error
        if shape != (3, spec.vocab_size):
            raise Refused(f"it has {shape[-1]} logits, but its configuration says vocab_size {spec.vocab_size}")


def _on_meta(spec: TransformersSpec, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return build_on_meta(json.loads(spec.config), dtype, RECORD)
    except Exception as error:  # transformers' checks of a configuration raise many types
        if isinstance(error, KeyError) and RECORD in error.args:
            raise Refused("its attention is its own code, which nothing can replace") from error
        raise Refused(f"transformers cannot build it: {in_one_line(error)}") from error


class _BodyOutput(MoeModelOutputWithPast):  # type: ignore[misc]  # transformers is not type-checked
    """Hidden states alone: of all else that a head may pass on to its caller there is none."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _GivenHidden(nn.Module):
    """Stands for a model's body in its head: the hidden states that it is given are the result."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **_: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)


def _head_of(model: PreTrainedModel) -> PreTrainedModel:
    """What the model computes after its body (projection, scale, softcap), as a module that shares its parts: the
    model's own forward pass over another body, so that whatever a head does is done."""
    head = copy.copy(model)
    if model.base_model is model:
        raise Refused("it has no body apart from its head")
    head.__dict__["_modules"] = {**model._modules, model.base_model_prefix: _GivenHidden()}
    return head


def _check_calls(calls: Sequence[AttentionCall], num_layers: int) -> None:
    """Raises `Refused` where the KV cache does not hold all that a later token needs."""
    if len(calls) != num_layers:
        raise Refused(f"it has {len(calls)} attention calls in {num_layers} layers, and the others have another state")
    if len({call.module for call in calls}) != num_layers:
        raise Refused("a layer is computed more than once")


def _attention_layers(calls: Sequence[AttentionCall], on_rank: Sequence[AttentionCall], ranks: int) -> list[Attention]:
    """calls: of the whole model with masks; on_rank: of this rank's share, as the engine's passes are."""
    layers = []
    for index, (call, local) in enumerate(zip(calls, on_rank, strict=True)):
        heads = (local.num_heads, local.num_kv_heads)
        shares = {(call.num_heads // n, call.num_kv_heads // n) for n in (1, ranks)}
        if heads not in shares or call.num_heads % heads[0] or call.num_kv_heads % heads[1]:
            raise Refused(
                f"{call.num_heads} attention and {call.num_kv_heads} KV heads cannot be split over {ranks} ranks"
            )
        layers.append(
            Attention(
                index,
                *heads,
                call.head_size,
                call.scale,
                call.sliding_window,
                v_head_size=call.v_head_size,
                softcap=call.softcap,
                has_sinks=call.has_sinks,
            )
        )
    return layers
