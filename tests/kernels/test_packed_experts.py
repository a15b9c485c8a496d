"""Quantized experts of one token by FMA, and FP8 experts of several by FP8 rows, against their references.

Tolerance: as in `test_experts`; where rows are rounded to FP8, a sum near the middle of two codes is rounded to either.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from expert_stacks import stacked_experts
from test_experts import FORMS, GPT_OSS, SILU, Case, routed

from ringcore.checkpoint.quantization import AwqFormat, CodesFormat, InputFormat, OnLoadFormat, PackedFormat
from ringcore.kernels.linears.skinny_times import FP8_NUMBERS
from ringcore.kernels.mixtures import experts as experts_module
from ringcore.kernels.mixtures import packed_experts_fma
from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, Routing, experts_reference
from ringcore.kernels.mixtures.experts import experts, takes_norm
from ringcore.kernels.mixtures.experts_configs import choose_grouped
from ringcore.model_executor import ops
from ringcore.model_executor.expert_schemes.stacked import ExpertStack
from ringcore.model_executor.linear_schemes import quantized_product
from ringcore.model_executor.linear_schemes.awq_scheme import AwqScheme
from ringcore.model_executor.linear_schemes.codes_scheme import CodesScheme
from ringcore.model_executor.linear_schemes.on_load_scheme import OnLoadScheme, quantize_groups
from ringcore.model_executor.linear_schemes.packed_scheme import PackedScheme
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("_as_on_a_gpu")]

BLOCKS = CodesScheme(CodesFormat("fp8", "block", (128, 128), "weight_scale_inv", InputFormat("fp8", "group", 128)))
CHANNELS = CodesScheme(CodesFormat("fp8", "channel", inputs=InputFormat("fp8", "token")))
ROUNDED = {"blocks": ("fp8 block", BLOCKS), "channels": ("fp8 channel", CHANNELS)}
EXACT = {
    "fp8": ("fp8 channel", CodesScheme(CodesFormat("fp8", "channel"))),
    "int8": ("int8", CodesScheme(CodesFormat("int8", "channel"))),
    "int4": ("w4", PackedScheme(PackedFormat(4, 32))),
    "awq": ("awq", AwqScheme(AwqFormat(32))),
}
FORMS_OF_KERNELS = [name for name, one in FORMS.items() if isinstance(one, ExpertGate)]


@pytest.fixture
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for programs in ("_GATE_PROGRAMS", "_DOWN_PROGRAMS"):  # so few that each has several tiles
        monkeypatch.setattr(packed_experts_fma, programs, 6)


class PackedCase(Case):
    def __init__(self, device, kind, scheme, hidden=256, size=128, num_experts=4, *, bias=False):
        super().__init__(device, num_experts, hidden, size, bias=bias)
        whole = self.matrices.up.stored, self.matrices.down.stored
        up, down = (stacked_experts(kind, scheme, matrices, block=(128, 128))[0] for matrices in whole)
        self.matrices = ExpertMatrices(up, down, self.matrices.up_bias, self.matrices.down_bias)


def check_one(case, tolerance, *, k=2, kind="random", activate=SILU, norm=None):
    x, routing = case.randn(1, case.hidden), routed(kind, 1, case.num_experts, k, case.device)
    assert takes_norm(1, case.matrices, activate)
    rows = x if norm is None else torch.nn.functional.rms_norm(x, x.shape[1:], *norm)
    exact = experts_reference(rows, routing, case.matrices, activate)
    compute = partial(experts, x, routing, case.matrices, activate, norm=norm)
    assert (compute() - exact).norm() <= tolerance * exact.norm()
    stream = case.randn(1, case.hidden)
    expected = stream + exact
    assert compute(add_to=stream) is stream
    assert (stream - expected).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ["random", "twice the same"])
@pytest.mark.parametrize("name", EXACT)
def test_one_token(device, name, kind, k):
    """Of 3 experts the inputs of down are no whole blocks."""
    check_one(PackedCase(device, *EXACT[name]), 1e-5, k=k, kind=kind)


@pytest.mark.parametrize("form", FORMS_OF_KERNELS)
@pytest.mark.parametrize("name", ["fp8", "awq"])
def test_one_token_in_every_form(device, monkeypatch, name, form):
    """Of several blocks and of tiles of outputs that are not whole."""
    monkeypatch.setattr(packed_experts_fma, "_MAX_BLOCK", 128)
    check_one(PackedCase(device, *EXACT[name], 160, 96, bias=True), 1e-5, activate=FORMS[form])


@pytest.mark.parametrize("max_block", [128, 2048])
@pytest.mark.parametrize(("hidden", "size"), [(256, 128), (384, 256)])
@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("k", [1, 3])
def test_one_token_rounded_to_fp8(device, monkeypatch, name, hidden, size, max_block, k):
    monkeypatch.setattr(packed_experts_fma, "_MAX_BLOCK", max_block)
    check_one(PackedCase(device, *ROUNDED[name], hidden, size), 0.01, k=k)


@pytest.mark.parametrize("name", ["fp8", "int4", "blocks", "channels"])
@pytest.mark.parametrize("first", [0, 2, 9])
def test_the_norm_is_a_prologue(device, name, first):
    """Also on a rank that has one of its two experts, or none: what is undefined memory elsewhere adds nothing."""
    case = PackedCase(device, *(EXACT | ROUNDED)[name], num_experts=3)
    case.matrices, gain = replace(case.matrices, first=first), case.randn(case.hidden)
    routing = Routing(torch.tensor([[2, 0]], device=device), torch.tensor([[0.7, 0.2]], device=device))
    x, stream = 4 * case.randn(1, case.hidden), case.randn(1, case.hidden)
    normed = torch.nn.functional.rms_norm(x, x.shape[1:], gain, 1e-3)
    exact = experts_reference(normed, routing, case.matrices, SILU)
    expected = stream + exact
    assert experts(x, routing, case.matrices, SILU, norm=(gain, 1e-3), add_to=stream) is stream
    assert (stream - expected).norm() <= 0.01 * exact.norm() + 1e-6
    assert exact.any() == (first < 9)


@pytest.mark.parametrize("name", ROUNDED)
@pytest.mark.parametrize("kind", ["random", "all alike"])
@pytest.mark.parametrize("n", [2, 20, 70])
def test_several_tokens_by_fp8(device, monkeypatch, name, kind, n):
    """The rows of both products are rounded by a kernel of their own, never by torch's operations."""
    case = PackedCase(device, *ROUNDED[name])
    x, routing = case.randn(n, case.hidden), routed(kind, n, case.num_experts, 2, device)
    exact = experts_reference(x, routing, case.matrices, SILU)
    for matrix in (case.matrices.up, case.matrices.down):
        monkeypatch.setattr(matrix, "rounded", None)
    assert (experts(x, routing, case.matrices, SILU) - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("block_weights", [128, 256])
@pytest.mark.parametrize("form", ["silu", "gpt_oss"])
def test_rows_are_the_m_side_of_many_tokens(device, block_weights, form):
    """Where 128 outputs share their scales; of halves of a tile those of gate and of up, or none if interleaved."""
    case = PackedCase(device, *ROUNDED["blocks"], 512, 256)
    assert case.matrices.up.stored.scale_run == case.matrices.down.stored.scale_run == 128
    for matrix in (case.matrices.up, case.matrices.down):  # scales of blocks differ much, so that none is another's
        matrix.stored.scales.mul_(2.0 ** torch.randint(-2, 3, (len(matrix.stored) // 128, 1), device=device))
    x, routing = case.randn(70, case.hidden), routed("random", 70, case.num_experts, 2, device)
    exact = experts_reference(x, routing, case.matrices, FORMS[form])
    tile = experts_module.DotConfig(block_weights, 128, 4, 2, 1, block_rows=64)
    assert (experts(x, routing, case.matrices, FORMS[form], config=tile) - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("number", ["fp8", "int4"])
def test_experts_that_are_quantized_while_they_are_loaded(device, number):
    """Codes and scales are one row of bytes."""
    scheme, num_experts, hidden, size = OnLoadScheme(OnLoadFormat(number)), 3, 256, 128
    case = Case(device, num_experts, hidden, size)

    def loaded(matrices):
        _, num_outputs, num_inputs = matrices.shape
        output = OutputSlice("m", num_outputs, 0, num_outputs)
        shard = LinearShard("m", (output,), InputSlice.whole(num_inputs), torch.float32)
        stack = ExpertStack("m", scheme, (shard,) * num_experts)
        (weight,) = stack.weights().values()
        rows = weight.parts[0].encoding(matrices.flatten(0, 1))
        weight.arrangement.arrange(rows)
        bound = stack.bound({"weight": rows}, updatable=True)
        codes, scales = quantize_groups(matrices.reshape(-1, num_inputs // 128, 128), number)
        numbers = ((codes.float() - (8 if number == "int4" else 0)) * scales[..., None]).view_as(matrices)
        every_expert = torch.arange(num_experts, device=device)
        torch.testing.assert_close(bound.numbers(every_expert), numbers, atol=1e-6, rtol=1e-5)
        return bound

    case.matrices = ExpertMatrices(loaded(case.matrices.up.stored), loaded(case.matrices.down.stored))
    check_one(case, 1e-5)
    case.check(5, config=experts_module.DotConfig(32, 128, 2, 2, 1, block_rows=16))


def test_rows_that_no_kernel_rounds(device):
    """A scale of the checkpoint's own, or INT8: torch rounds them, and one token takes the grouped products."""
    scheme = CodesScheme(CodesFormat("int8", "channel", inputs=InputFormat("int8", "token")))
    case = PackedCase(device, "int8", scheme)
    assert not takes_norm(1, case.matrices, SILU)
    case.check(1, config=experts_module.DotConfig(32, 32, 2, 2, 1, block_rows=16))


def test_what_is_not_taken(device):
    assert not takes_norm(2, PackedCase(device, *EXACT["fp8"]).matrices, SILU)
    assert not takes_norm(1, PackedCase(device, *EXACT["fp8"], 264, 128).matrices, GPT_OSS), "no whole vectors"


def test_a_tile_of_fp8_is_in_one_group():
    for num_tokens in (1, 8, 64, 65, 8192):
        config = choose_grouped(128, 1536, 2048, num_tokens, 8, torch.bfloat16, FP8_NUMBERS)
        assert quantized_product.BLOCK % config.block_inputs == 0
