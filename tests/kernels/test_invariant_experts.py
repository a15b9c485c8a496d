"""Experts and routers by tiles that agree: a token has the same bits in any number of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from expert_stacks import stacked_experts
from interpreted_triton import multiply_in_order
from quantized_checkpoints import BLOCK

from ringcore.checkpoint.model_spec import ExpertsSpec
from ringcore.checkpoint.quantization import AwqFormat
from ringcore.distributed.parallel import SingleRank
from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.mixtures import invariant_experts
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import (
    ExpertGate,
    ExpertMatrices,
    ExpertWeight,
    RouterForm,
    Routing,
    experts_reference,
    route_reference,
)
from ringcore.kernels.mixtures.experts import experts, takes_norm
from ringcore.kernels.mixtures.invariant_experts import ANY_NUMBER, InvariantExpertTiles
from ringcore.kernels.partials import Partials
from ringcore.model_executor import ops
from ringcore.model_executor.arithmetic import BatchInvariant
from ringcore.model_executor.layers.norm import RMSNorm
from ringcore.model_executor.layers.router import InvariantRouter
from ringcore.model_executor.linear_schemes.awq_scheme import AwqScheme
from ringcore.model_executor.linear_schemes.dense import Dense
from ringcore.model_executor.models.decoder_layer import LayerInputs
from ringcore.model_executor.models.mixture import Experts, Mixture, Router
from ringcore.model_executor.residual import NormedRows, Residual

K, NUM_EXPERTS = 2, 4
COUNTS = (1, 3, 20, 70)  # pairs, and lists of work items, of every tile of few rows


@pytest.fixture(autouse=True)
def kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    if device.type == "cpu":
        monkeypatch.setattr(np, "matmul", multiply_in_order)


def dense(num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> ExpertWeight:
    draw = torch.Generator().manual_seed(num_outputs)
    return DenseExperts(torch.randn(NUM_EXPERTS, num_outputs, num_inputs, generator=draw).to(device, dtype))


def of_4_bits(num_outputs: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> ExpertWeight:
    draw = torch.Generator().manual_seed(num_outputs)
    matrices = torch.randn(NUM_EXPERTS, num_outputs, num_inputs, generator=draw).to(device)
    return stacked_experts("awq", AwqScheme(AwqFormat(32)), matrices, dtype, BLOCK)[0]


def routed(n: int, device: torch.device) -> Routing:
    draw = torch.Generator().manual_seed(3)
    scores = torch.rand(n, NUM_EXPERTS, generator=draw)
    top = scores.topk(K)
    return Routing(top.indices.to(device), top.values.to(device))


@pytest.mark.parametrize(
    ("weights", "dtype", "sizes"),
    [(dense, torch.float32, (40, 24)), (dense, torch.float16, (40, 24)), (of_4_bits, torch.float16, (128, 128))],
    ids=["float32", "float16", "4 bits"],
)
def test_a_token_has_the_same_bits_in_any_number_of_tokens(
    device: torch.device, weights: Callable[..., ExpertWeight], dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    """Also where the sum over experts is left to the next norm."""
    hidden_size, size = sizes
    up, down = weights(2 * size, hidden_size, dtype, device), weights(hidden_size, size, dtype, device)
    matrices = ExpertMatrices(up, down)
    tiles, routing = InvariantExpertTiles(matrices), routed(COUNTS[-1], device)
    x = torch.randn(COUNTS[-1], hidden_size, generator=torch.Generator().manual_seed(1)).to(device, dtype)

    def sums(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        own = Routing(routing.experts[rows], routing.weights[rows])
        options = {"choose": tiles.choose, "limits": ANY_NUMBER}
        out = torch.empty(len(own.experts), hidden_size, device=device)
        experts(x[rows].contiguous(), own, matrices, ExpertGate(), out=out, **options)
        deferred: list[Partials] = []
        stream = torch.zeros_like(out)
        experts(x[rows].contiguous(), own, matrices, ExpertGate(), add_to=stream, defer=deferred.append, **options)
        assert not stream.any(), "the sum is deferred"
        return out, deferred[0].rows

    whole, of_experts = sums(slice(None))
    exact = experts_reference(x, routing, matrices, ExpertGate())
    torch.testing.assert_close(whole, exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
    for count in COUNTS[:-1]:
        rows = slice(7, 7 + count)
        out, each = sums(rows)
        assert torch.equal(out, whole[rows]), count
        assert torch.equal(each, of_experts[:, rows]), count


def test_one_token_is_no_case_of_its_own(device: torch.device) -> None:
    matrices = ExpertMatrices(dense(32, 32, torch.float32, device), dense(32, 16, torch.float32, device))
    assert takes_norm(1, matrices, ExpertGate())
    assert not takes_norm(1, matrices, ExpertGate(), limits=ANY_NUMBER)


def test_tiles_follow_the_tokens_among_those_that_agree(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = ExpertMatrices(dense(32, 32, torch.float16, device), dense(32, 16, torch.float16, device))

    def rows_of(offset_of_16: float) -> list[int]:
        def multiply(rows: torch.Tensor, weight: torch.Tensor, tile: DotConfig, out: torch.Tensor) -> None:
            out.copy_(rows[:, :1].float() + (offset_of_16 if tile.block_rows == 16 else 0))

        monkeypatch.setattr(invariant_experts, "_multiply", multiply)
        choose = InvariantExpertTiles(matrices).choose
        return [choose(NUM_EXPERTS, 32, 32, n, K, torch.float16).block_rows for n in (1, 20, 64, 100, 4096)]

    assert rows_of(offset_of_16=0) == [16, 32, 64, 64, 256]
    assert rows_of(offset_of_16=1) == [32, 32, 64, 64, 256]


def test_the_grouped_kernel_is_asked(device: torch.device) -> None:
    """Its product, of every row, by each tile."""
    draw = torch.Generator().manual_seed(1)
    rows, weight = (torch.randn(n, 48, generator=draw).to(device, torch.float16) for n in (70, 40))
    for tile in (DotConfig(64, 128, 4, 4, 1, block_rows=16), DotConfig(128, 64, 8, 4, 1, block_rows=256)):
        out = torch.full((70, 40), torch.nan, device=device)
        invariant_experts._multiply(rows, weight, tile, out)
        torch.testing.assert_close(out, rows.float() @ weight.float().t(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_router_chooses_alike_for_any_number_of_tokens(device: torch.device, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 48, generator=draw).to(device, dtype) for n in (COUNTS[-1], 24))
    form = RouterForm(4, normalises=True)
    router = InvariantRouter(weight, form)
    whole, exact = router(NormedRows(Residual(x))), route_reference(x, weight, form)
    assert torch.equal(whole.experts.long(), exact.experts)
    torch.testing.assert_close(whole.weights, exact.weights, rtol=2e-3, atol=2e-3)
    for count in COUNTS[:-1]:
        rows = slice(7, 7 + count)
        found = router(NormedRows(Residual(x[rows].contiguous())))
        assert torch.equal(found.experts, whole.experts[rows])
        assert torch.equal(found.weights, whole.weights[rows])


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_native_mixture_adds_the_same_bits_to_the_stream(device: torch.device, expert_parallel: bool) -> None:
    """Its router and its experts as `deterministic` binds them on a GPU, the norm before and the deferred add after."""
    hidden_size, spec = 32, ExpertsSpec(NUM_EXPERTS, K, 16, norm_topk_prob=True)
    arithmetic, dense_scheme = BatchInvariant(torch.device("cuda")), Dense()
    norm = RMSNorm("norm", "norm", hidden_size, 1e-6, torch.float16)
    router = Router("router", "gate", spec, hidden_size, torch.float16, arithmetic)
    mixture = Mixture(
        router,
        Experts(
            *("experts", "mlp", spec, hidden_size, torch.float16, SingleRank(), expert_parallel),
            lambda matrix: dense_scheme,
            arithmetic=arithmetic,
        ),
    )
    draw = torch.Generator().manual_seed(1)
    for layer in (norm, *mixture.layers()):
        layer.bind(
            {one.name: torch.randn(one.shape, generator=draw).to(device, torch.float16) for one in layer.weights()}
        )
    rows = torch.randn(COUNTS[-1], hidden_size, generator=draw).to(device)

    def added(count: int) -> torch.Tensor:
        stream = Residual(rows[:count].clone())
        mixture.add_to(stream, norm, stream, cast(LayerInputs, None))
        return stream.rows

    whole = added(COUNTS[-1])
    assert not torch.equal(whole, rows)
    for count in COUNTS[:-1]:
        assert torch.equal(added(count), whole[:count]), count
