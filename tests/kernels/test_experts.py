"""The experts of a mixture against their reference: every routing, form and number of tokens.

Tolerance: sums in float32 in another order, of numbers whose sums of squares are about 1.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

import pytest
import torch
from expert_stacks import stacked_experts
from test_precompile import run

from ringcore.checkpoint.quantization import AwqFormat, CodesFormat, GptqFormat, InputFormat, Mxfp4Format
from ringcore.kernels.add_partials import add_partials
from ringcore.kernels.linears.skinny_tiles import DotConfig
from ringcore.kernels.linears.skinny_times import E2M1_NUMBERS
from ringcore.kernels.mixtures import experts_fma, experts_sort
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, Routing, experts_reference
from ringcore.kernels.mixtures.experts import experts, new_expert_counters, takes_norm
from ringcore.kernels.mixtures.experts_configs import choose_grouped
from ringcore.kernels.mixtures.experts_sort import list_items, max_items, sort_pairs, sort_pairs_reference
from ringcore.model_executor import ops
from ringcore.model_executor.expert_schemes.schemes import experts_scheme
from ringcore.model_executor.expert_schemes.stacked import ExpertStack
from ringcore.model_executor.linear_schemes.awq_scheme import AwqScheme
from ringcore.model_executor.linear_schemes.codes_scheme import CodesScheme
from ringcore.model_executor.linear_schemes.gptq_scheme import GptqScheme
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice

pytestmark = pytest.mark.sampled

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SMALL = DotConfig(32, 32, 2, 2, 1, block_rows=16)
WHOLE_RUNS = DotConfig(32, 128, 2, 2, 1, block_rows=16)  # of 4 bits, a block of which is four products
SILU = ExpertGate()
GPT_OSS = ExpertGate(alpha=1.702, limit=0.7, offset=1.0, is_interleaved=True)
FORMS = {
    "silu": SILU,
    "gelu": ExpertGate(is_gelu=True),
    "clamped": ExpertGate(limit=0.5),
    "gpt_oss": GPT_OSS,
    "of the model": lambda rows: rows[:, : rows.shape[1] // 2].tanh() * rows[:, rows.shape[1] // 2 :],
    "without a gate": lambda rows: torch.relu(rows).square(),
}
ROUTINGS = ("random", "one", "all alike", "last ones", "twice the same")


def routed(kind: str, n: int, num_experts: int, k: int, device: torch.device) -> Routing:
    generator = torch.Generator(device).manual_seed(n)
    scores = torch.rand(n, num_experts, generator=generator, device=device)
    weights = torch.rand(n, k, generator=generator, device=device)
    match kind:
        case "random":
            chosen = scores.topk(k).indices
        case "one":  # and what else it must choose
            scores[:, num_experts // 2] = 2
            chosen = scores.topk(k).indices
        case "all alike":
            chosen = (torch.arange(n * k, device=device) % num_experts).view(n, k)
        case "last ones":
            chosen = (num_experts - 1 - torch.arange(k, device=device)).expand(n, k).contiguous()
        case "twice the same":
            chosen = scores.topk(1).indices.expand(n, k).contiguous()
    return Routing(chosen, weights)


class Case:
    """Random experts of one shape."""

    def __init__(self, device, num_experts=5, hidden=40, size=24, *, gated=True, bias=False, transposed=False):
        generator = torch.Generator(device).manual_seed(num_experts)

        def randn(*shape, fan_in=1):
            return torch.randn(*shape, generator=generator, device=device) * fan_in**-0.5

        up = randn(num_experts, size * (2 if gated else 1), hidden, fan_in=hidden)
        down = randn(num_experts, hidden, size, fan_in=size)
        if transposed:
            up, down = (one.transpose(1, 2).contiguous() for one in (up, down))
        biases = (randn(num_experts, size * (2 if gated else 1)), randn(num_experts, hidden)) if bias else (None, None)
        self.matrices = ExpertMatrices(DenseExperts(up, transposed), DenseExperts(down, transposed), *biases)
        self.randn, self.hidden, self.num_experts, self.device = randn, hidden, num_experts, device

    def check(self, n, k=2, activate=SILU, kind="random", normalise=None, config=SMALL):
        x, routing = self.randn(n, self.hidden), routed(kind, n, self.num_experts, k, self.device)
        exact = experts_reference(x, routing, self.matrices, activate, normalise)
        counters = new_expert_counters(self.matrices)
        run = partial(experts, x, routing, self.matrices, activate, normalise, counters=counters, config=config)
        torch.testing.assert_close(run(), exact, atol=2e-5, rtol=1e-4)
        stream = self.randn(n, self.hidden)
        expected = stream + exact
        assert run(add_to=stream) is stream
        torch.testing.assert_close(stream, expected, atol=2e-5, rtol=1e-4)
        deferred = []
        assert run(add_to=stream, defer=deferred.append) is stream
        assert len(deferred) == (n > 4 or (n > 0 and normalise is not None)), "few tokens have an epilogue"
        for partials in deferred:
            add_partials(stream, partials)
        torch.testing.assert_close(stream, expected + exact, atol=4e-5, rtol=1e-4)
        assert not counters.any(), "the next launch finds them so"


@pytest.mark.parametrize("max_scanned", [0, 4096])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize(("n", "num_experts", "first"), [(1, 4, 0), (33, 8, 0), (700, 7, 0), (40, 4, 4), (5, 1, 0)])
def test_pairs_are_sorted_by_expert(device, monkeypatch, n, num_experts, first, kind, k, max_scanned):
    """Also of the experts that one rank has, in one launch and in two."""
    monkeypatch.setattr(experts_sort, "_MAX_SCANNED", max_scanned)
    chosen = routed(kind, n, max(k, first + num_experts), k, device).experts
    for indices in (chosen, chosen.int()):
        order, offsets = sort_pairs(indices, num_experts, first)
        expected = sort_pairs_reference(indices, num_experts, first)
        assert torch.equal(offsets, expected.offsets)
        assert torch.equal(order[: offsets[-1]], expected.order[: offsets[-1]])
        assert all(tensor.dtype == torch.int32 for tensor in (order, offsets, *expected))


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("block_rows", [8, 16])
@pytest.mark.parametrize(
    ("n", "num_experts", "first", "k"), [(5, 6, 0, 2), (64, 40, 0, 3), (21, 8, 4, 4), (9, 1, 0, 1)]
)
def test_items_are_tiles_of_the_sorted_pairs(device, n, num_experts, first, k, block_rows, kind):
    indices = routed(kind, n, max(k, num_experts + 2 * first), k, device).experts
    pairs, heads = list_items(indices.contiguous(), num_experts, first, block_rows)
    expected = sort_pairs_reference(indices, num_experts, first)
    found, offsets = [], expected.offsets.tolist()
    for expert, (begin, end) in enumerate(pairwise(offsets)):
        for at in range(begin, end, block_rows):
            rows = expected.order[at : min(at + block_rows, end)].tolist()
            found.append((expert, end - at, rows + [int(expected.order[begin])] * (block_rows - len(rows))))
    assert len(found) <= len(heads) == len(pairs)
    of_items = zip(heads[:, 0].tolist(), heads[:, 1].tolist(), pairs.tolist(), strict=True)
    assert list(of_items)[: len(found)] == found
    assert not heads[len(found) :, 1].any(), "the others are none"


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("n", [1, 3, 16, 17, 50])
def test_every_routing(device, n, kind):
    """As many tokens as sum in the product and as do not, in one tile of an expert and in several."""
    Case(device).check(n, kind=kind)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_the_last_tile_of_an_expert_is_smaller_where_it_fits(device, monkeypatch, kind):
    monkeypatch.setattr("ringcore.kernels.mixtures.experts._MIN_SPLIT_ROWS", 32)
    config = DotConfig(32, 32, 4, 2, 1, block_rows=32)
    monkeypatch.setattr("ringcore.kernels.mixtures.experts.MAX_LISTED_TOKENS", 16)
    Case(device).check(21, kind=kind, config=config)


@pytest.mark.parametrize(
    ("n", "rows_of_down", "finds_early"), [(3, 8, True), (9, 16, True), (9, 8, False), (300, 8, True)]
)
def test_what_is_sorted_between_the_products_is_read_after_a_wait(device, monkeypatch, n, rows_of_down, finds_early):
    """What was sorted before the first product may be read while that one ends."""
    launches = []
    monkeypatch.setattr(
        "ringcore.kernels.mixtures.experts.grouped_kernel",
        {grid: lambda *_, **given: launches.append(given["finds_early"]) for grid in product(range(1, 9), range(999))},
    )
    case, rows = Case(device), iter((16, rows_of_down))
    experts(
        case.randn(n, case.hidden),
        routed("random", n, case.num_experts, 2, device),
        case.matrices,
        SILU,
        choose=lambda *shape: replace(SMALL, block_rows=next(rows)),
    )
    assert launches == [False, finds_early]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(device, form, bias, transposed):
    case = Case(device, gated=form != "without a gate", bias=bias, transposed=transposed)
    for n in (2, 20):
        case.check(n, activate=FORMS[form])


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("k", [1, 3])
def test_one_token_by_fma(device, k, kind):
    Case(device, 5, 40, 24).check(1, k, kind=kind, config=None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("form", [name for name, one in FORMS.items() if isinstance(one, ExpertGate)])
def test_one_token_by_fma_in_every_form(device, monkeypatch, form, bias):
    """Of several blocks of inputs, of which the last one is not whole."""
    monkeypatch.setattr(experts_fma, "_GATE_INPUTS", 16)
    monkeypatch.setattr(experts_fma, "_DOWN_NUMBERS", 32)
    Case(device, 4, 40, 24, bias=bias).check(1, activate=FORMS[form], config=None)


@pytest.mark.parametrize("block_inputs", [16, 64])
@pytest.mark.parametrize("first", [0, 3])
def test_the_norm_is_a_prologue_for_one_token(device, monkeypatch, first, block_inputs):
    """Also on a rank that has none of its experts: it adds nothing."""
    monkeypatch.setattr(experts_fma, "_GATE_INPUTS", block_inputs)
    case, hidden = Case(device, 3, 40, 24), 40
    matrices = replace(case.matrices, first=first)
    assert takes_norm(1, matrices, SILU)
    x, gain, stream = 4 * case.randn(1, hidden), case.randn(hidden), case.randn(1, hidden)
    routing = Routing(torch.tensor([[2, 0]], device=device), torch.tensor([[0.7, 0.2]], device=device))
    exact = experts_reference(torch.nn.functional.rms_norm(x, (hidden,), gain, 1e-3), routing, matrices, SILU)
    expected = stream + exact
    assert experts(x, routing, matrices, SILU, norm=(gain, 1e-3), add_to=stream) is stream
    torch.testing.assert_close(stream, expected, atol=2e-5, rtol=1e-4)
    assert exact.any() == (first == 0)


def test_what_takes_no_norm(device, has_kernels):
    matrices = Case(device).matrices
    assert not takes_norm(2, matrices, SILU)
    assert not takes_norm(1, matrices, FORMS["of the model"])
    assert not takes_norm(1, matrices, SILU, lambda rows: rows)
    assert not takes_norm(1, Case(device, transposed=True).matrices, SILU)
    assert not takes_norm(1, PackedCase(device).matrices, GPT_OSS)


@pytest.mark.parametrize("n", [2, 20])
def test_outputs_of_experts_are_normalised(device, n):
    Case(device).check(n, normalise=lambda rows: torch.nn.functional.rms_norm(rows, rows.shape[-1:]))


@pytest.mark.parametrize(
    ("num_experts", "k"), [(1, 1), (2, 2), (3, 3), (64, 6), pytest.param(128, 8, marks=pytest.mark.long_form), (256, 8)]
)
@pytest.mark.parametrize("n", [1, 18])
def test_every_number_of_experts(device, num_experts, k, n):
    Case(device, num_experts, 16, 16).check(n, k)


@pytest.mark.parametrize("n", [1, 9, 30])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_ranks_with_whole_experts_sum_to_the_layer(device, n, kind):
    """Also a rank without an expert of any token: it adds nothing, and computes nothing of undefined memory."""
    case, k = Case(device, 6, bias=True), 2
    x, routing = case.randn(n, case.hidden), routed(kind, n, 6, k, device)
    exact, total = experts_reference(x, routing, case.matrices, SILU), 0
    whole = case.matrices
    for first in (0, 2, 4):
        own = [DenseExperts(one.stored[first : first + 2]) for one in (whole.up, whole.down)]
        biases = [one[first : first + 2] for one in (whole.up_bias, whole.down_bias)]
        share = ExpertMatrices(*own, *biases, first=first)
        expected = experts_reference(x, routing, share, SILU)
        ours = experts(x, routing, share, SILU, config=SMALL)
        torch.testing.assert_close(ours, expected, atol=2e-5, rtol=1e-4)
        total = total + ours
    torch.testing.assert_close(total, exact, atol=3e-5, rtol=1e-4)


def test_sixteen_bits_are_rounded_once_for_few_tokens(device):
    case = Case(device, 4, 64, 32)
    half = [DenseExperts(one.stored.half()) for one in (case.matrices.up, case.matrices.down)]
    matrices = ExpertMatrices(*half)
    for n in (2, 20):
        x, routing = case.randn(n, 64).half(), routed("random", n, 4, 2, device)
        exact = experts_reference(x, routing, matrices, SILU)
        ours = experts(x, routing, matrices, SILU, config=SMALL)
        assert ours.dtype == torch.float16
        torch.testing.assert_close(ours.float(), exact, atol=2e-3, rtol=2e-3)
        stream = torch.zeros(n, 64, device=device)
        experts(x, routing, matrices, SILU, config=SMALL, add_to=stream)
        torch.testing.assert_close(stream, exact, atol=1e-3, rtol=1e-3)
        assert (stream.half().float() != stream).float().mean() > 0.5


def test_a_token_does_not_know_of_the_others(device):
    """To the bit, within the numbers of tokens that share a tile."""
    case, k = Case(device), 2
    x, routing = case.randn(16, case.hidden), routed("random", 16, 5, k, device)
    whole = experts(x, routing, case.matrices, SILU, config=SMALL)
    for n in (1, 7):
        few = Routing(routing.experts[:n], routing.weights[:n])
        assert torch.equal(experts(x[:n], few, case.matrices, SILU, config=SMALL), whole[:n])


def test_a_token_that_is_not_finite_is_alone(device):
    case = Case(device)
    for n in (3, 20):
        x, routing = case.randn(n, case.hidden), routed("all alike", n, 5, 2, device)
        x[1, 7] = float("inf")
        ours = experts(x, routing, case.matrices, SILU, config=SMALL)
        assert ours[[0, 2]].isfinite().all()
        assert not ours[1].isfinite().any()


@pytest.fixture
def has_kernels(monkeypatch):
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)


class PackedCase(Case):
    """Random MXFP4 experts with biases, of gpt-oss's form."""

    def __init__(self, device, num_experts=5, hidden=96, size=64):
        super().__init__(device, num_experts, hidden, size, bias=True)
        biases = self.matrices.up_bias, self.matrices.down_bias
        up, down = (mxfp4(num_experts, *shape, device) for shape in ((2 * size, hidden), (hidden, size)))
        self.matrices = ExpertMatrices(up, down, *biases)


def mxfp4(num_experts, num_outputs, num_inputs, device, dtype=torch.float32):
    """Scales from 2^-5 to 2^-2, another one for every group."""
    generator = torch.Generator(device).manual_seed(num_outputs)

    def random(low, high, *shape):
        shape = num_experts, num_outputs, num_inputs // 32, *shape
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator, device=device)

    tensors, scheme = {"_blocks": random(0, 256, 16), "_scales": random(122, 126)}, experts_scheme(Mxfp4Format())
    for suffix, tensor in tensors.items():
        before = tensor.clone()
        scheme.arrangement(suffix).restore(tensor)
        scheme.arrangement(suffix).arrange(tensor)
        assert torch.equal(tensor, before)
        scheme.arrangement(suffix).arrange(tensor)
    return scheme.weight(tensors, dtype)


@pytest.mark.parametrize(
    ("block_inputs", "hidden"),
    [(64, 96), (128, 96)],
    ids=["two groups, the last of one", "one for all"],
)
@pytest.mark.usefixtures("has_kernels")
def test_quantized_experts_are_expanded_in_tiles(device, block_inputs, hidden):
    config = DotConfig(32, block_inputs, 2, 2, 1, block_rows=16)
    case = PackedCase(device, hidden=hidden, size=32)
    for n in (2, 20):
        case.check(n, activate=GPT_OSS, config=config)


@pytest.mark.usefixtures("has_kernels")
def test_experts_in_blocks_of_fp8_with_rounded_inputs(device):
    """As they are stacked of a checkpoint's single matrices; a rank's share begins within a block."""
    form = CodesFormat("fp8", "block", (32, 16), "weight_scale_inv", InputFormat("fp8", "group", 16))
    num_experts, hidden, size = 3, 32, 24
    case, scheme = Case(device, num_experts, hidden, size), CodesScheme(form)

    def stacked(num_outputs, inputs, start, length):
        own = OutputSlice("m", num_outputs, start, length)
        shard = LinearShard("experts", (own,), inputs, torch.float32)
        stack = ExpertStack("experts", scheme, (shard,) * num_experts)
        tensors = {
            suffix: (case.randn(*weight.shape).abs() + 0.1).to(weight.dtype)
            for suffix, weight in stack.weights().items()
        }
        return stack.bound(tensors, updatable=True)

    up = stacked(96, InputSlice.whole(hidden), 40, 2 * size)
    case.matrices = ExpertMatrices(up, stacked(hidden, InputSlice(48, 24, size), 0, hidden))
    x, routing = case.randn(20, hidden), routed("random", 20, num_experts, 2, device)
    exact = experts_reference(x, routing, case.matrices, SILU)
    ours = experts(x, routing, case.matrices, SILU, config=SMALL)
    assert (ours - exact).norm() < 0.01 * exact.norm(), "a sum near the middle of two codes is rounded to either"
    assert up.rounded(x).unique().numel() < x.numel()


@pytest.mark.usefixtures("has_kernels")
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("awq", AwqScheme(AwqFormat(32))),
        ("gptq", GptqScheme(GptqFormat(4, 32))),
        ("gptq 8", GptqScheme(GptqFormat(8, 32))),
    ],
)
def test_experts_of_4_and_8_bits_as_a_gpu_has_them(device, kind, scheme):
    """Rearranged in the memory of each expert; after an update too."""
    num_experts, hidden, size = 3, 64, 32
    case = Case(device, num_experts, hidden, size)

    def stacked(num_outputs, num_inputs):
        matrices = case.randn(num_experts, num_outputs, num_inputs, fan_in=num_inputs)
        weight, numbers, tensors = stacked_experts(kind, scheme, matrices)
        scales = next(name for name in tensors if "scale" in name)
        every_expert = torch.arange(num_experts, device=device)
        torch.testing.assert_close(weight.numbers(every_expert), numbers, atol=1e-6, rtol=1e-5)
        tensors[scales] *= 2
        weight.refresh()
        torch.testing.assert_close(weight.numbers(every_expert), 2 * numbers, atol=1e-6, rtol=1e-5)
        return weight

    case.matrices = ExpertMatrices(stacked(2 * size, hidden), stacked(hidden, size))
    case.check(5, config=WHOLE_RUNS)


@pytest.mark.usefixtures("has_kernels")
def test_quantized_experts_of_one_rank_and_tiles_as_they_are_chosen(device):
    case = PackedCase(device, 3, 32, 32)
    first = ExpertMatrices(case.matrices.up, case.matrices.down, first=2)
    x, routing = case.randn(5, 32), routed("random", 5, 6, 3, device)
    expected = experts_reference(x, routing, first, GPT_OSS)
    torch.testing.assert_close(experts(x, routing, first, GPT_OSS), expected, atol=2e-5, rtol=1e-4)
    case.check(70, activate=GPT_OSS, config=None)
    for num_tokens in (1, 64, 65, 8192):
        config = choose_grouped(32, 5760, 2880, num_tokens, 4, torch.bfloat16, E2M1_NUMBERS)
        assert config.block_inputs <= 128, "wider tiles of e2m1 take ten times as long"


def test_no_token_is_no_launch(device):
    case = Case(device)
    empty = Routing(torch.empty(0, 2, dtype=torch.long, device=device), torch.empty(0, 2, device=device))
    assert experts(case.randn(0, case.hidden), empty, case.matrices, SILU).shape == (0, case.hidden)


def test_work_items_are_bounded_by_the_tokens_not_by_the_experts():
    assert max_items(8, 128, 16) == 8
    assert max_items(8192 * 8, 128, 128) == 512 + 128
    assert max_items(8192 * 8, 256, 128) == 512 + 256
    for num_tokens in range(1, 200):
        for dtype in (torch.bfloat16, torch.float32):
            for size in (768, 640):  # measured, and not
                config = choose_grouped(128, 2 * size, 2048, num_tokens, 8, dtype)
                assert config.splits == 1
                assert config.block_weights >= 32
                assert config.block_rows >= num_tokens * 8 / 128, "one item an expert, on average"
    few, skewed = (choose_grouped(num_experts, 1280, 2048, 64, 8, torch.bfloat16) for num_experts in (128, 8))
    assert (few.block_rows, skewed.block_rows) == (16, 64)


def test_more_tokens_as_they_are_chosen(device):
    """No tile of the test's own."""
    Case(device, 3, 32, 32).check(70, config=None)


@pytest.mark.timeout(3600)
def test_every_count_of_tokens(device, is_long):
    """The long form has all of 1 to 512, and all numbers of experts of 1 to 256: many minutes in the interpreter."""
    case = Case(device, 6, 16, 16)
    for n in range(1, 513) if is_long else (2, 15, 31, 63, 65):
        case.check(n)
    for num_experts in range(1, 257) if is_long else ():
        Case(device, num_experts, 16, 16).check(11, min(num_experts, 4))


@pytest.mark.long_form
def test_they_compile_for_sm90(tmp_path):
    """In tensor-core instructions, which the interpreter does not know, and without spilled registers."""
    script = """
        import torch, triton_for_sm90
        from ringcore.kernels.mixtures.dense_experts import DenseExperts
        from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, RouterForm, Routing
        from ringcore.kernels.mixtures.experts import experts
        from ringcore.checkpoint.quantization import Mxfp4Format
        from ringcore.kernels.launch.precompile import intercept_launches
        from ringcore.kernels.mixtures.router import route
        from ringcore.model_executor import ops
        from ringcore.model_executor.expert_schemes.schemes import experts_scheme

        ops.has_kernels = lambda device: True

        def empty(*shape):
            return torch.empty(*shape, dtype=torch.bfloat16)

        up, down = DenseExperts(empty(32, 512, 1024), True), DenseExperts(empty(32, 512, 512), True)
        biased = ExpertMatrices(up, down, empty(32, 1024), empty(32, 512))
        blocks = {"_blocks": empty(32, 1024, 16, 16).byte(), "_scales": empty(32, 1024, 16).byte()}
        packed = experts_scheme(Mxfp4Format()).weight(blocks, torch.bfloat16)
        down = {name: tensor[:, :512].contiguous() for name, tensor in blocks.items()}
        down = experts_scheme(Mxfp4Format()).weight(down, torch.bfloat16)
        packed = ExpertMatrices(packed, down, empty(32, 1024), empty(32, 512))
        gates = ExpertGate(alpha=1.702, limit=7.0, offset=1.0, is_interleaved=True), ExpertGate()
        with intercept_launches() as found:
            for n, gate in ((4, gates[1]), (40, gates[1]), (100, gates[0])):
                routing = Routing(torch.zeros(n, 4, dtype=torch.long), empty(n, 4))
                experts(empty(n, 512), routing, biased, gate, add_to=torch.empty(n, 512))
                experts(empty(n, 512), routing, packed, gates[0], add_to=torch.empty(n, 512))
            for n in (1, 64, 128):
                form = RouterForm(8, True)
                route(empty(n, 2048), empty(128, 2048), form, counters=torch.zeros(64, dtype=torch.int32))
            plain = ExpertMatrices(*(DenseExperts(empty(*shape)) for shape in ((32, 1024, 512), (32, 512, 512))))
            routing = Routing(torch.zeros(1, 4, dtype=torch.int32), empty(1, 4))
            norm = empty(512), 1e-6
            experts(torch.empty(1, 512), routing, plain, gates[1], norm=norm, add_to=torch.empty(1, 512))
        for (kernel, _), variant in found.items():
            text = kernel.preload(variant.specialization).asm["ptx"]
            print(kernel.__name__, "wgmma" in text, ".local" in text)
    """
    kernels = {"_items_kernel False False": 2, "grouped_kernel True False": 12, "weighted_sum_kernel False False": 2}
    kernels |= {"router_row_kernel False False": 2} | {
        f"_{name}_kernel False False": 1 for name in ("logits", "choose")
    }
    kernels |= {f"expert_{name}_kernel False False": 1 for name in ("gate", "down")}
    assert Counter(run(script, tmp_path).splitlines()) == kernels


@needs_gpu
@pytest.mark.parametrize("n", [1, 3, 8, 40, 64, 65, 512, 3000])
@pytest.mark.parametrize(("num_experts", "k", "hidden", "size"), [(128, 8, 2048, 768), (8, 2, 4096, 1792)])
def test_shapes_of_models_as_they_are_chosen(device, num_experts, k, hidden, size, n):
    """Of 16 bits: each number is rounded between the products and, for many tokens, after them."""
    case = Case(device, num_experts, hidden, size)
    matrices = ExpertMatrices(*(DenseExperts(one.stored.bfloat16()) for one in (case.matrices.up, case.matrices.down)))
    for kind in ("random", "one"):
        x, routing = case.randn(n, hidden).bfloat16(), routed(kind, n, num_experts, k, device)
        ours = experts(x, routing, matrices, SILU, out=torch.empty(n, hidden, device=device))
        exact = in_pieces(x, routing, matrices)
        assert (ours - exact).norm() < 0.01 * exact.norm()


def in_pieces(x, routing, matrices):
    """The reference gathers the matrices of every pair."""
    pieces = [slice(first, first + 16) for first in range(0, len(x), 16)]
    return torch.cat(
        [
            experts_reference(x[piece], Routing(routing.experts[piece], routing.weights[piece]), matrices, SILU)
            for piece in pieces
        ]
    )


@needs_gpu
@pytest.mark.parametrize("n", [2, 40, 300])
def test_a_graph_serves_every_routing(device, n):
    case = Case(device, 16, 128, 64)
    x, routing = case.randn(n, 128), routed("random", n, 16, 2, device)
    counters = new_expert_counters(case.matrices)

    def run():
        return experts(x, routing, case.matrices, SILU, counters=counters)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for kind in ROUTINGS:
        routing.experts.copy_(routed(kind, n, 16, 2, device).experts)
        graph.replay()
        expected = experts_reference(x, routing, case.matrices, SILU)
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
