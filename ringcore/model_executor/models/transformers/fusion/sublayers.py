"""Recognises attention by what it computes in a sample pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.fusion.mlps import linears_of
from ringcore.model_executor.models.transformers.fusion.plan import AttentionPlan, LinearRows, NormPlan, RotaryPlan
from ringcore.model_executor.models.transformers.fusion.sample_pass import (
    Call,
    NotRecognised,
    SampleLinear,
    SamplePass,
)
from ringcore.model_executor.models.transformers.fusion.trial import Trial

__all__ = ["find_attention", "rotaries_of"]


def find_attention(
    sample: SamplePass,
    trial: Trial,
    path: str,
    attention: AttentionCall,
    norms: Mapping[str, NormPlan],
) -> AttentionPlan:
    """Attention over heads that are rows of linears, perhaps normalised and then rotated. Raises `NotRecognised`."""
    call, module = sample.of(path), sample.body.get_submodule(path)
    if attention.v_head_size != attention.head_size or attention.head_size % 2:
        raise NotRecognised(f"{path} has heads of {attention.head_size} and values of {attention.v_head_size}")
    own_norms = [norms[one.name] for one in sample.within(path) if one.name in norms]
    linears = linears_of(sample, call)
    *_, (out, out_linear) = linears.items()
    with _without(module, [norm.path.removeprefix(f"{path}.") for norm in own_norms]):
        q, k, v, sinks = _head_rows(sample, call, linears)
    used = {rows.path for rows in (*q, *k, *v)}
    has_biases = {linears[name].bias is not None for name in used}
    if len(has_biases) > 1 or {*used, out} != set(linears) or out in used:
        raise NotRecognised(f"{path} has other linears than those of q, k, v and its output")
    heads = [attention.num_heads * attention.head_size, attention.num_kv_heads * attention.head_size]
    pairs = _norm_pairs(own_norms, heads, attention.head_size)
    rotaries = rotaries_of(call, sample.rotaries, attention.head_size)
    # Some scale q themselves, and not by the attention call.
    for query_scale, pair, rotary in itertools.product((1.0, attention.head_size**-0.5), pairs, rotaries):
        plan = AttentionPlan(
            *(q, k, v),
            has_bias=has_biases == {True},
            out=out,
            out_has_bias=out_linear.bias is not None,
            query_scale=query_scale,
            rotary=rotary,
            qk_norms=pair,
            sinks=_name_of_sinks(sample, path, sinks),
        )
        ours = trial.parts().attention(path, plan, attention)
        if trial.sublayer_agrees(ours, call, [trial.rotation(rotary, attention.head_size)]):
            return plan
    raise NotRecognised(f"{path} computes its heads otherwise than by a norm and a rotation of linears' rows")


def _name_of_sinks(sample: SamplePass, path: str, sinks: torch.Tensor | None) -> str | None:
    if sinks is None:
        return None
    names = {id(tensor): name for name, tensor in sample.body.named_parameters()}
    if id(sinks) not in names:
        raise NotRecognised(f"{path} computes its sinks")
    return names[id(sinks)]


def _head_rows(
    sample: SamplePass, call: Call, linears: Mapping[str, SampleLinear]
) -> tuple[tuple[LinearRows, ...], tuple[LinearRows, ...], tuple[LinearRows, ...], torch.Tensor | None]:
    """Which rows of which linear each head of q, of k and of v depends on: where the gradient is not 0."""
    collected: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
    with torch.enable_grad():
        for name, linear in linears.items():
            linear.outputs = collected[name]
        heads = sample.again(call)
        for linear in linears.values():
            linear.outputs = None
        leaves = {name: outputs[0] for name, outputs in collected.items()}
        found = [_rows_of(leaves, x) for x in (heads.query, heads.key, heads.value)]
    return found[0], found[1], found[2], heads.sinks


def _rows_of(leaves: Mapping[str, torch.Tensor], heads: torch.Tensor) -> tuple[LinearRows, ...]:
    """heads: [1, num_heads, num_tokens, head_size], computed from leaves [1, num_tokens, outputs]."""
    if not heads.requires_grad:
        raise NotRecognised("a head depends on no linear")
    num_heads, size = heads.shape[1], heads.shape[3]
    weights = torch.rand(heads.shape, generator=torch.Generator().manual_seed(1)) + 0.5
    sums, rows = (heads * weights).sum((0, 2, 3)), []  # of a number no gradient is given, for which torch imports sympy
    for head in range(num_heads):
        gradients = torch.autograd.grad(sums[head], list(leaves.values()), retain_graph=True, allow_unused=True)
        used = {
            name: gradient[0].abs().sum(0).nonzero().flatten().tolist()
            for name, gradient in zip(leaves, gradients, strict=True)
            if gradient is not None and gradient.any()
        }
        if len(used) != 1:
            raise NotRecognised(f"a head depends on {len(used)} linears")
        ((name, places),) = used.items()
        if places != list(range(places[0], places[0] + size)):
            raise NotRecognised("a head depends on rows of a linear that are not its own")
        rows.append(LinearRows(name, leaves[name].shape[-1], places[0], size))
    return tuple(rows)


@contextmanager
def _without(module: nn.Module, paths: Sequence[str]) -> Iterator[None]:
    """The submodules give back what they are given."""
    kept = {path: module.get_submodule(path) for path in paths}
    for path in paths:
        module.set_submodule(path, nn.Identity())
    try:
        yield
    finally:
        for path, submodule in kept.items():
            module.set_submodule(path, submodule)


def _norm_pairs(
    norms: Sequence[NormPlan], sizes: Sequence[int], head_size: int
) -> Iterator[tuple[NormPlan, NormPlan] | None]:
    """What may be the norms of q and k: of each head, or of all of them."""
    if not norms:
        yield None
    for q, k in itertools.permutations(norms, 2):
        alike = (q.eps, q.plus_one) == (k.eps, k.plus_one) and not (q.is_centred or k.is_centred)
        if len(norms) == 2 and alike and [q.size, k.size] in ([head_size] * 2, list(sizes)):
            yield q, k


def rotaries_of(call: Call, rotaries: Sequence[Call], head_size: int) -> Iterator[RotaryPlan | None]:
    """The usual form first; without a rotation last."""
    given = {id(tensor) for tensor in call.tensors()}
    for source, rotary in enumerate(rotaries):
        tensors = rotary.output if isinstance(rotary.output, tuple) else (rotary.output,)
        if not all(id(tensor) in given for tensor in tensors):
            continue
        width = tensors[0].shape[-1]
        for dim, halves, stride in itertools.product((width, 2 * width), (True, False), (1, 2)):
            if dim <= head_size and (dim // 2 - 1) * stride < width:
                yield RotaryPlan(source, dim, halves, stride)
    yield None
