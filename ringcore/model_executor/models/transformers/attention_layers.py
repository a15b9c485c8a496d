"""The attention layers of a model's recorded calls, and which of them share a KV cache (cross-layer KV sharing).

A layer that is given the keys and values of an earlier one reads that one's pages and writes nothing. So it is no layer
of the KV cache plan, whose blocks are smaller by its pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ringcore.attention.layer import AnyAttention
from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.fusion.parts import local_attention
from ringcore.model_executor.models.transformers.refusal import Refused

__all__ = ["attention_layers"]


def attention_layers(
    calls: Sequence[AttentionCall],
    on_rank: Sequence[AttentionCall],
    ranks: int,
    ours: Mapping[int, AnyAttention],
    shared: Mapping[int, int],
) -> list[AnyAttention]:
    """By call; the index of one that shares a KV cache is that of the layer whose cache it reads.

    calls: of the whole model with masks; on_rank: of this rank's share, as the engine's passes are. ours: of the layers
    that are, by index. shared: see `shared_kv`; two layers that differ in more than the index have a cache each.
    """
    layers: list[AnyAttention] = []
    for index, (call, local) in enumerate(zip(calls, on_rank, strict=True)):
        if index in ours:
            layers.append(ours[index])
            continue
        layer = local_attention(call, index, *_local_heads(call, local, ranks))
        source = shared.get(index)
        if source is not None and source not in ours and replace(layer, index=source) == layers[source]:
            layer = replace(layer, index=source, shares_kv=True)
        layers.append(layer)
    return layers


def _local_heads(call: AttentionCall, local: AttentionCall, ranks: int) -> tuple[int, int]:
    heads = (local.num_heads, local.num_kv_heads)
    shares = {(call.num_heads // n, call.num_kv_heads // n) for n in (1, ranks)}
    if heads not in shares or call.num_heads % heads[0] or call.num_kv_heads % heads[1]:
        raise Refused(f"{call.num_heads} attention and {call.num_kv_heads} KV heads cannot be split over {ranks} ranks")
    return heads
