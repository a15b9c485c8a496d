"""Which recognised parts can be ours on these ranks, with the tensors that the checkpoint has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.checkpoint_layout import TensorLayout
from ringcore.model_executor.models.transformers.fusion.plan import (
    AnyAttentionPlan,
    AttentionPlan,
    GatedPlan,
    LatentPlan,
    LayerPlan,
    MLPPlan,
    ModulePlan,
    NormPlan,
    PlainPlan,
)
from ringcore.model_executor.models.transformers.fusion.recognised import Recognised
from ringcore.model_executor.models.transformers.fusion.sample_pass import NotRecognised

__all__ = ["Part", "fitting", "is_of_module", "modules_of"]

Part = LayerPlan | AnyAttentionPlan | MLPPlan | NormPlan


def fitting(
    found: Recognised,
    calls: Sequence[AttentionCall],
    layouts: Mapping[str, TensorLayout],
    dtype: torch.dtype,
    num_ranks: int,
) -> Recognised:
    """Without the parts that cannot be ours here, with the reasons; and without those that are only together with a
    whole layer: an MLP of several modules, and norms with a mean, for which we have no kernel. layouts: by the tensor's
    name in the body."""
    reasons = dict(found.reasons)
    call_of = dict(zip(found.layers, calls, strict=False))  # none, where nothing is recognised

    def fits(path: str, part: AnyAttentionPlan | MLPPlan | NormPlan) -> bool:
        try:
            _check_tensors(part, layouts, dtype)
            match part:
                case AttentionPlan() | LatentPlan():
                    call = next(call for layer, call in call_of.items() if path.startswith(f"{layer}."))
                    _check_heads(part, call, num_ranks)
                case GatedPlan() | PlainPlan() if part.up.length % num_ranks:
                    raise NotRecognised(f"{part.up.length} intermediate entries do not divide over {num_ranks} ranks")
        except NotRecognised as error:
            reasons[path] = str(error)
            return False
        return True

    attentions = {path: part for path, part in found.attentions.items() if fits(path, part)}
    mlps = {path: part for path, part in found.mlps.items() if fits(path, part)}
    norms = {path: part for path, part in found.norms.items() if fits(path, part)}
    left = [*attentions.values(), *mlps.values(), *norms.values()]
    plans = {path: plan for path, plan in found.plans.items() if all(part in left for part in _parts_of(plan))}
    final_norm = found.final_norm if found.final_norm in left else None
    in_layers = {final_norm, *(part for plan in plans.values() for part in _parts_of(plan))}
    return replace(
        found,
        attentions=attentions,
        mlps={path: part for path, part in mlps.items() if part in in_layers or is_of_module(path, part)},
        norms={path: part for path, part in norms.items() if part in in_layers or not part.is_centred},
        plans=plans,
        reasons=reasons,
        final_norm=final_norm,
    )


def is_of_module(path: str, mlp: MLPPlan) -> bool:
    """Whether it is all that the module at `path` computes, and not an MLP of several modules, of which that is the
    first."""
    return mlp.down.startswith(f"{path}.")


def modules_of(part: Part) -> Iterator[str]:
    """The paths of the modules in whose place the part has tensors, and the names of its other tensors."""
    match part:
        case LayerPlan():
            for inner in _parts_of(part):
                yield from modules_of(inner)
        case AttentionPlan():
            yield from dict.fromkeys(rows.path for rows in (*part.q, *part.k, *part.v))
            yield part.out
            yield from (norm.path for norm in part.qk_norms or ())
            if part.sinks is not None:
                yield part.sinks
        case LatentPlan():
            yield from (part.q, part.kv_down, part.kv_norm.path, part.kv_up, part.out)
            if part.q_down is not None and part.q_norm is not None:
                yield from (part.q_down, part.q_norm.path)
        case GatedPlan():
            yield from dict.fromkeys((part.gate.path, part.up.path))
            yield part.down
        case PlainPlan():
            yield part.up.path
            yield part.down
        case NormPlan():
            yield part.path


def _parts_of(plan: LayerPlan) -> list[AnyAttentionPlan | MLPPlan | NormPlan]:
    """Those that are ours."""
    sublayers = [part for part in (plan.attention, plan.mlp) if not isinstance(part, ModulePlan)]
    return [*sublayers, *plan.norms.all()]


def _check_tensors(
    part: AnyAttentionPlan | MLPPlan | NormPlan, layouts: Mapping[str, TensorLayout], dtype: torch.dtype
) -> None:
    """That the checkpoint has them as the model does: a name, a whole tensor, of the model's dtype."""
    for module in modules_of(part):
        for name, suffix in ((module, ""), (f"{module}.weight", ".weight"), (f"{module}.bias", ".bias")):
            layout = layouts.get(name)
            if layout is None:
                continue
            readable = layout.is_whole and layout.dtype == dtype
            if not readable or not layout.pieces[0].checkpoint_name.endswith(suffix):
                raise NotRecognised(f"the checkpoint has {name} in another form")


def _check_heads(part: AnyAttentionPlan, call: AttentionCall, num_ranks: int) -> None:
    kv_heads = call.num_kv_heads
    if call.num_heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        raise NotRecognised(f"{call.num_heads} attention and {kv_heads} KV heads do not divide over {num_ranks} ranks")
    norms = part.qk_norms if isinstance(part, AttentionPlan) else None
    if num_ranks > 1 and norms is not None and norms[0].size != call.head_size:
        raise NotRecognised(f"{norms[0].path} is over the heads of all ranks")
