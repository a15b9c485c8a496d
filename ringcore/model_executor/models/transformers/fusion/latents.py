"""Recognises latent attention by what it computes in a sample pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.fusion.mlps import linears_of
from ringcore.model_executor.models.transformers.fusion.plan import LatentPlan, LatentSizes, NormPlan, RotaryPlan
from ringcore.model_executor.models.transformers.fusion.sample_pass import (
    NotRecognised,
    SampleLinear,
    SamplePass,
)
from ringcore.model_executor.models.transformers.fusion.sublayers import rotaries_of
from ringcore.model_executor.models.transformers.fusion.trial import Trial

__all__ = ["find_latent_attention"]

_Linears = Mapping[str, SampleLinear]


def find_latent_attention(
    sample: SamplePass,
    trial: Trial,
    path: str,
    attention: AttentionCall,
    norms: Mapping[str, NormPlan],
) -> LatentPlan | None:
    """None where no sizes of the linears and norms fit latent attention. Raises `NotRecognised` where they fit, and
    something else is computed."""
    call = sample.of(path)
    linears = linears_of(sample, call)
    own_norms = [norms[one.name] for one in sample.within(path) if one.name in norms]

    def rotaries(size: int) -> list[RotaryPlan]:
        return [rotary for rotary in rotaries_of(call, sample.rotaries, size) if rotary is not None]

    plan = None
    for plan in _plans(linears, own_norms, attention, rotaries):
        rotation = trial.rotation(plan.rotary, plan.sizes.qk_rope_head_dim)
        if trial.sublayer_agrees(
            trial.parts().attention(path, plan, attention, trial.index_of(plan)), call, [rotation]
        ):
            return plan
    if plan is None:
        return None
    raise NotRecognised(f"{path} computes its heads otherwise than by a normalised latent and a rotation")


def _plans(
    linears: _Linears,
    norms: Sequence[NormPlan],
    attention: AttentionCall,
    rotaries: Callable[[int], Iterable[RotaryPlan]],
) -> Iterator[LatentPlan]:
    """By the sizes: which linear may be which, in the order in which they are called first; and which norm.

    rotaries: by the numbers that are rotated."""
    *inner, out = linears
    is_plain = not (attention.sliding_window or attention.chunk_size or attention.softcap or attention.has_sinks)
    if len(inner) not in (3, 4) or attention.num_heads != attention.num_kv_heads or not is_plain:
        return
    for names in itertools.permutations(inner):
        *q_down, q, kv_down, kv_up = names
        first = linears[q_down[0] if q_down else q]  # of the hidden rows, as kv_down
        sizes = _sizes(linears[kv_down], linears[kv_up], attention)
        biases = {first.bias is not None, linears[kv_down].bias is not None}
        if sizes is None or len(biases) > 1 or linears[kv_up].bias is not None:
            continue
        widths = [first.out_features] * len(q_down) + [sizes.kv_lora_rank]
        forms = itertools.product(
            itertools.permutations(norms), (1.0, attention.head_size**-0.5), rotaries(sizes.qk_rope_head_dim)
        )
        for own_norms, query_scale, rotary in forms if _are_queries(first, linears[q], attention) else ():
            if [norm.size for norm in own_norms] != widths or any(norm.is_centred for norm in own_norms):
                continue
            yield LatentPlan(
                sizes,
                q=q,
                q_has_bias=linears[q].bias is not None,
                q_down=q_down[0] if q_down else None,
                q_norm=own_norms[0] if q_down else None,
                kv_down=kv_down,
                down_has_bias=biases == {True},
                kv_norm=own_norms[-1],
                kv_up=kv_up,
                out=out,
                out_has_bias=linears[out].bias is not None,
                query_scale=query_scale,
                rotary=rotary,
            )


def _are_queries(first: SampleLinear, last: SampleLinear, attention: AttentionCall) -> bool:
    """Whether `last` may have the heads of queries, of the outputs of `first` or as `first` itself."""
    has_heads = last.out_features == attention.num_heads * attention.head_size
    return has_heads and (first is last or last.in_features == first.out_features)


def _sizes(kv_down: SampleLinear, kv_up: SampleLinear, attention: AttentionCall) -> LatentSizes | None:
    """Those of latent attention, if these are the linears before and after its latent."""
    of_head, rest = divmod(kv_up.out_features, attention.num_heads)
    nope, rank = of_head - attention.v_head_size, kv_up.in_features
    rope = attention.head_size - nope
    # Even: the numbers of a pair are neighbours, also where the pairs of a row begin.
    if rest or nope <= 0 or rope <= 0 or rope % 2 or nope % 2 or rank % 2 or kv_down.out_features != rank + rope:
        return None
    return LatentSizes(rank, rope, nope, attention.v_head_size)
