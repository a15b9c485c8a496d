"""The router of a mixture: logits, their softmax or sigmoids, the k largest.

Few tokens take one launch (`router_fma`). Of more, or with a larger matrix, a launch multiplies tiles of the router's
matrix, over a share of the inputs each (split-K), of many cuBLAS; another launch adds the partials and chooses, a
program a token. Torch's operations would be seven launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ringcore.kernels.launch.dependent_launch import gdc_launch_dependents, gdc_wait, launch_options, supports_pdl
from ringcore.kernels.mixtures.expert_matrices import RouterForm, Routing
from ringcore.kernels.mixtures.router_fma import MAX_INPUTS, MAX_TOKENS, choose, route_few_tokens, scores_of

__all__ = ["choose_experts", "new_router_counters", "route", "takes_norm"]

_MAX_READ = 1 << 24  # numbers of the matrix, by few tokens together: 64 of them with 128 experts of 2,048 inputs
_MAX_SPLIT_TOKENS = 256  # the logits of more are cuBLAS's
_BLOCK_EXPERTS, _BLOCK_INPUTS = 16, 128
_MIN_ROWS, _MAX_ROWS = 16, 64  # of a program
_SPLIT_INPUTS = 512  # of one program, at least


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    x,  # [num_tokens, num_inputs]
    weight,  # [num_experts, num_inputs]
    partials,  # [splits, num_tokens, num_experts] float32
    num_tokens,  # int
    num_experts: tl.constexpr,
    num_inputs: tl.constexpr,
    block_tile: tl.constexpr,  # experts of one program
    block_rows: tl.constexpr,
    block_inputs: tl.constexpr,
    splits: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program (i, j, r) multiplies experts tile i and row tile r over split j of the inputs."""
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(0) * block_tile + tl.arange(0, block_tile)
    row = tl.program_id(2) * block_rows + tl.arange(0, block_rows)
    steps = tl.arange(0, block_inputs)
    share: tl.constexpr = (num_inputs + splits * block_inputs - 1) // (splits * block_inputs) * block_inputs
    begin = tl.program_id(1) * share
    matrix = weight + expert[:, None] * num_inputs + steps[None, :]
    inputs = x + row[None, :] * num_inputs + steps[:, None]
    total = tl.zeros([block_tile, block_rows], tl.float32)
    for at in tl.range(begin, begin + share, block_inputs, num_stages=4):
        is_input = steps < num_inputs - at
        w = tl.load(matrix + at, mask=(expert < num_experts)[:, None] & is_input[None, :], other=0.0)
        v = tl.load(inputs + at, mask=is_input[:, None] & (row < num_tokens)[None, :], other=0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
    targets = partials + (tl.program_id(1) * num_tokens + row)[None, :] * num_experts + expert[:, None]
    tl.store(targets, total, mask=(expert < num_experts)[:, None] & (row < num_tokens)[None, :])


@triton.jit
def _choose_kernel(
    x,  # of the dtype to which logits are rounded
    partials,  # [splits, num_tokens, num_experts], any float dtype
    bias,  # [num_experts], read where has_bias
    correction,  # [num_experts], read where is_corrected
    experts,  # [num_tokens, k] int32
    weights,  # [num_tokens, k]
    num_experts: tl.constexpr,
    k: tl.constexpr,
    block_k: tl.constexpr,
    splits: tl.constexpr,
    normalises: tl.constexpr,  # this and the next three: see `RouterForm`
    is_sigmoid: tl.constexpr,
    rounds_logits: tl.constexpr,
    scale: tl.constexpr,
    has_bias: tl.constexpr,
    is_corrected: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    """Program i chooses for token i."""
    token, num_tokens = tl.program_id(0), tl.num_programs(0)
    if pdl:
        gdc_launch_dependents()
        gdc_wait()
    logits = partials + token * num_experts
    rounds_to: tl.constexpr = x.dtype.element_ty if rounds_logits else None
    scores = scores_of(logits, num_tokens * num_experts, bias, num_experts, splits, is_sigmoid, rounds_to, has_bias)
    pairs = token * k
    choose(
        *(scores, correction, experts + pairs, weights + pairs),
        num_experts, k, block_k, normalises, scale, is_corrected,
    )  # fmt: skip


def new_router_counters(device: torch.device) -> torch.Tensor:
    """The arrival counters by which programs of one token find the last one: 0 before and after a launch."""
    return torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device)


def takes_norm(num_tokens: int, weight: torch.Tensor) -> bool:
    """Whether `route` has a norm as its prologue for so many tokens, each of which reads the matrix by itself."""
    is_few = num_tokens == 1 or (num_tokens <= MAX_TOKENS and num_tokens * weight.numel() <= _MAX_READ)
    return is_few and weight.shape[1] <= MAX_INPUTS


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    form: RouterForm,
    *,
    counters: torch.Tensor,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    normed: torch.Tensor | None = None,
) -> Routing:
    """As `route_reference` of `kernels.expert_matrices`; of equal scores that of the first expert.

    x: [n, hidden_size], weight: [num_experts, hidden_size], bias and correction: [num_experts]; contiguous. The experts
    are int32.

    counters: see `new_router_counters`, not shared with what may run at the same time.
    norm: prologue, of what `takes_norm`: gain [hidden_size] and eps; x may have any float dtype, and its norm is not
    rounded before the product. normed: [n, hidden_size], contiguous, of any float dtype, gets the norm, rounded.
    """
    assert len(x), "no token has no launch"
    assert x.is_contiguous(), "rows must be contiguous"
    assert weight.is_contiguous(), "the matrix must be contiguous"
    assert normed is None or (norm is not None and normed.shape == x.shape and normed.is_contiguous())
    if takes_norm(len(x), weight):
        dtype = form.dtype or weight.dtype
        vectors = {"bias": bias, "correction": correction}
        return route_few_tokens(x, weight, form, dtype, counters=counters, norm=norm, normed=normed, **vectors)
    assert norm is None, "the norm is a prologue for few tokens"
    if len(x) <= _MAX_SPLIT_TOKENS:
        return choose_experts(x, _partials(x, weight), form, bias, correction)
    dtype = x.dtype if form.rounds_logits else torch.float32
    logits = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    return choose_experts(x, logits[None], form, None, correction)


def _partials(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[splits, num_tokens, num_experts] float32, whose sum are the logits."""
    (num_tokens, num_inputs), num_experts, pdl = x.shape, len(weight), supports_pdl(x.device)
    splits = min(8, max(1, num_inputs // _SPLIT_INPUTS))
    partials = torch.empty(splits, num_tokens, num_experts, dtype=torch.float32, device=x.device)
    block_rows = min(_MAX_ROWS, max(_MIN_ROWS, triton.next_power_of_2(num_tokens)))
    _logits_kernel[(triton.cdiv(num_experts, _BLOCK_EXPERTS), splits, triton.cdiv(num_tokens, block_rows))](
        *(x, weight, partials, num_tokens),
        num_experts=num_experts,
        num_inputs=num_inputs,
        block_tile=_BLOCK_EXPERTS,
        block_rows=block_rows,
        block_inputs=_BLOCK_INPUTS if x.dtype != torch.float32 else _BLOCK_INPUTS // 4,
        splits=splits,
        pdl=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return partials


def choose_experts(
    x: torch.Tensor,
    partials: torch.Tensor,
    form: RouterForm,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
) -> Routing:
    """As `route`. x: of the dtype to which logits are rounded, and of the weights. partials: [splits, n, num_experts],
    of any float dtype, contiguous, whose sum are the logits."""
    (splits, num_tokens, num_experts), k, pdl = partials.shape, form.k, supports_pdl(x.device)
    experts = torch.empty(num_tokens, k, dtype=torch.int32, device=x.device)
    weights = torch.empty(num_tokens, k, dtype=form.dtype or x.dtype, device=x.device)
    _choose_kernel[(num_tokens,)](
        *(x, partials, partials if bias is None else bias, partials if correction is None else correction),
        *(experts, weights),
        num_experts=num_experts,
        k=k,
        block_k=triton.next_power_of_2(k),
        splits=splits,
        normalises=form.normalises,
        is_sigmoid=form.is_sigmoid,
        rounds_logits=form.rounds_logits,
        scale=form.scale,
        has_bias=bias is not None,
        is_corrected=correction is not None,
        pdl=pdl,
        num_warps=4,
        **launch_options(pdl),
    )
    return Routing(experts, weights)
