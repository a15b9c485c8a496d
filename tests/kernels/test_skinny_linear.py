"""Products of few rows against float64, and what goes with them.

Tolerance: sums in float32 in another order, some 1e-6 of the sum of the products' sizes; then one rounding. What a gate
makes of it can be no smaller than what it multiplies, so sizes are taken before the gate.
"""

from __future__ import annotations

import itertools
import mmap

import pytest
import torch
from rank_series import in_processes
from rounding import rounding

from ringcore.kernels.linears.skinny_configs import MAX_ROWS, choose
from ringcore.kernels.linears.skinny_linear import (
    new_split_k_counters,
    num_prefetched_inputs,
    skinny_linear,
    skinny_linear_reference,
)
from ringcore.kernels.linears.skinny_tiles import DotConfig, FmaConfig
from ringcore.kernels.partials import RowNorm
from ringcore.worker.memory.host_memory import HostVirtualMemory, host_view

pytestmark = pytest.mark.sampled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
FMA = FmaConfig(4, 64, 1)
DOT = DotConfig(32, 64, 2, 2, 1)
SPLIT = DotConfig(32, 32, 2, 2, 4)
BLOCKS = DotConfig(32, 64, 2, 2, 1, block_rows=16)
SPLIT_BLOCKS = DotConfig(32, 32, 2, 2, 4, block_rows=16)
ACTIVATIONS = {
    None: lambda x: x,
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}

# Triton's interpreter multiplies the bits of bfloat16 as integers.
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DOT_DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=needs_gpu), torch.float16]
large = pytest.mark.skipif(not torch.cuda.is_available(), reason="large shapes take the interpreter minutes")


class Case:
    """Random inputs of one shape; num_outputs is what comes out, half of the weight's rows where there is a gate."""

    def __init__(self, device, n, num_outputs, num_inputs, dtype, *, bias=False, norm=False, activation=None):
        generator = torch.Generator(device).manual_seed(n + num_outputs + num_inputs)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, device=device)

        num_weights = num_outputs * (2 if activation else 1)
        self.x = randn(n, num_inputs).to(dtype)
        self.weight = (randn(num_weights, num_inputs) * num_inputs**-0.5).to(dtype)
        self.bias = randn(num_weights).to(dtype) if bias else None
        self.norm = RowNorm((1 + 0.3 * randn(num_inputs)).to(dtype), EPS) if norm else None
        self.activation = activation
        self.hidden = randn(n, num_outputs).to(dtype)

    def options(self):
        return {"bias": self.bias, "norm": self.norm, "activation": self.activation}

    def run(self, config, **options):
        return skinny_linear(self.x, self.weight, config, **self.options() | options)

    def exact(self):
        """The result in float64, and how far float32 sums may be off."""
        x = self.x.double()
        if self.norm is not None:
            x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.norm.gain.double()
        weight = self.weight.double()
        product, size = x @ weight.T, x.abs() @ weight.abs().T
        if self.bias is not None:
            product, size = product + self.bias.double(), size + self.bias.double().abs()
        error = 3e-6 * size
        if self.activation is None:
            return product, error
        (gate, up), (gate_error, up_error) = product.chunk(2, -1), error.chunk(2, -1)
        # The slope of either activation is below 1.2.
        activated = ACTIVATIONS[self.activation](gate)
        return activated * up, 1.2 * gate_error * up.abs() + activated.abs() * up_error + 1e-6


def assert_close(ours, exact, error):
    assert ours.isfinite().all()
    room = error + (rounding(ours.dtype, ours.device) + 1e-6) * (exact.abs() + error)
    if ours.dtype == torch.float16:
        room = room + 2.0**-25  # half of its smallest number
    worst = ((ours.double() - exact).abs() / room).max()
    assert worst <= 1, float(worst)


def check(case, config):
    """The product alone, in memory with nothing beside it, and added to a stream."""
    n, num_outputs = case.hidden.shape
    exact, error = case.exact()
    buffer = torch.full((n + 2, num_outputs), float("nan"), dtype=case.x.dtype, device=case.x.device)
    out = buffer[:n]
    assert case.run(config, out=out) is out
    assert_close(out, exact, error)
    assert buffer[n:].isnan().all()
    total = case.hidden.double() + exact
    assert case.run(config, add_to=case.hidden) is case.hidden
    assert_close(case.hidden, total, error)


SHAPES = [
    (1, 64, 64),
    (2, 24, 128),  # more than one piece of the inputs
    (3, 37, 100),  # a tail of both
    (4, 8, 24),
]


# The interpreter has each shape in one format, and tails in all.
FMA_CASES = [
    (shape, dtype)
    for number, shape in enumerate(SHAPES)
    for dtype in (DTYPES if torch.cuda.is_available() or shape == (3, 37, 100) else DTYPES[number % 3 :][:1])
]


@pytest.mark.parametrize(("shape", "dtype"), FMA_CASES)
def test_few_rows_by_fma(device, shape, dtype):
    check(Case(device, *shape, dtype), FMA)
    check(Case(device, *shape, dtype, norm=True, bias=True), FMA)


@pytest.mark.parametrize("config", [DOT, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 64), (5, 96, 128), (16, 37, 100), (17, 40, 200), (64, 33, 40)])
def test_more_rows_by_tensor_cores(device, shape, dtype, config):
    check(Case(device, *shape, dtype, bias=shape[0] == 5), config)


@pytest.mark.parametrize("config", [BLOCKS, SPLIT_BLOCKS], ids=["whole", "split"])
@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("shape", [(17, 64, 64), (50, 37, 100), (64, 40, 200)])
def test_rows_of_several_programs(device, shape, dtype, config):
    check(Case(device, *shape, dtype, bias=shape[0] == 50), config)


@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu_tanh", True)])
@pytest.mark.parametrize(("config", "n"), [(FMA, 1), (FMA, 3), (DOT, 6), (SPLIT, 18), (SPLIT_BLOCKS, 50)], ids=str)
def test_gated(device, config, n, bias, activation):
    norm = isinstance(config, FmaConfig)
    check(Case(device, n, 41, 136, torch.float16, bias=bias, norm=norm, activation=activation), config)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("config", "n"), [(FMA, 2), (DOT, 7), (SPLIT, 7)], ids=str)
def test_kernel_and_reference_agree(device, config, n, dtype):
    case = Case(device, n, 48, 96, dtype, bias=True, norm=isinstance(config, FmaConfig), activation="silu")
    exact, error = case.exact()
    reference = skinny_linear_reference(case.x, case.weight, **case.options())
    assert_close(reference, exact, error)
    stream = skinny_linear_reference(case.x, case.weight, **case.options(), add_to=case.hidden.clone())
    assert_close(stream, exact + case.hidden.double(), error)
    rtol = 1e-4 + 2 * rounding(dtype, case.x.device) * (dtype != torch.float32)
    torch.testing.assert_close(case.run(config), reference, atol=1e-5, rtol=rtol)


@pytest.mark.parametrize(
    ("config", "rows"),
    [(FMA, (1, 2, 3, 4)), (DOT, (5, 9, 16)), (SPLIT, (5, 9, 16)), (BLOCKS, (17, 33)), (SPLIT_BLOCKS, (17, 33))],
    ids=str,
)
def test_a_row_does_not_know_of_the_others(device, config, rows):
    """To the bit, within the numbers of rows that share a configuration."""
    whole = Case(device, rows[-1], 48, 160, torch.float16)
    expected = whole.run(config)
    for n in rows:
        ours = skinny_linear(whole.x[-n:].contiguous(), whole.weight, config)
        assert torch.equal(ours, expected[-n:])


@pytest.mark.parametrize("dtype", DOT_DTYPES[1:])
@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
def test_logits_are_not_rounded(device, config, dtype):
    case = Case(device, 2, 67, 64, dtype)
    out = torch.full((2, 67), float("nan"), device=device)
    assert case.run(config, out=out) is out
    assert_close(out, *case.exact())
    assert (out.to(dtype).float() != out).double().mean() > 0.8


@pytest.mark.parametrize(("config", "n"), [(SPLIT, 6), (SPLIT_BLOCKS, 40)], ids=str)
def test_what_is_split_leaves_the_counters_as_they_were(device, config, n):
    """So the next step, or the next replay of a graph, finds them so."""
    case = Case(device, n, 200, 256, torch.float16)
    counters = new_split_k_counters(case.weight)
    first = case.run(config, counters=counters)
    assert not counters.any()
    assert torch.equal(case.run(config, counters=counters), first)
    assert_close(first, *case.exact())


@pytest.mark.parametrize("config", [FMA, DOT], ids=["fma", "dot"])
def test_a_row_that_is_not_finite_is_alone(device, config):
    case = Case(device, 3, 40, 64, torch.float16)
    case.x[1, 7] = float("inf")
    ours = case.run(config)
    assert ours[[0, 2]].isfinite().all()
    assert not ours[1].isfinite().any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is no telling what lies behind a GPU's memory")
@pytest.mark.parametrize(("config", "n"), [(FMA, 3), (DOT, 5), (SPLIT, 5), (BLOCKS, 18)], ids=str)
def test_nothing_is_read_behind_the_last_row(device, config, n):
    """It ends where nothing is mapped: who reads on is ended."""
    memory = HostVirtualMemory(lambda: 2 * mmap.PAGESIZE)
    address, file = memory.reserve(2 * mmap.PAGESIZE), memory.create(mmap.PAGESIZE)
    memory.map(address, mmap.PAGESIZE, file)
    case = Case(device, n, 32, 64, torch.float16)
    rows = (
        host_view(address, mmap.PAGESIZE, memory)[-case.x.nbytes :].view(torch.float16).view(case.x.shape).copy_(case.x)
    )

    def work(_):
        assert_close(skinny_linear(rows, case.weight, config), *case.exact())

    try:
        in_processes(1, work, 60)
    finally:
        memory.free(address, 2 * mmap.PAGESIZE)
        memory.release(file)


def test_the_norm_of_a_row_of_zeros(device):
    case = Case(device, 2, 16, 64, torch.bfloat16, norm=True)
    case.x[0] = 0
    assert not case.run(FMA)[0].any()


def test_the_stream_is_rounded_once(device):
    """1 + 2^-11 + 2^-11 is 1 + 2^-10, a float16 number; each of them alone would vanish."""

    def full(value, *shape):
        return torch.full(shape, value, dtype=torch.float16, device=device)

    for config in (FMA, DOT):
        hidden, x, weight = full(1.0, 1, 16), full(2.0**-8, 1, 64), full(2.0**-9, 16, 64)  # the product is 2^-11
        skinny_linear(x, weight, config, add_to=hidden, bias=full(2.0**-11, 16))
        assert torch.equal(hidden, full(1 + 2.0**-10, 1, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_stream_of_float32(device, dtype):
    """Normalised on its way into a product of 16 bits, and added to without being rounded to them."""
    case = Case(device, 2, 40, 100, dtype, norm=True)
    case.x = case.x.float() * 1.0001  # no number of 16 bits
    exact, error = case.exact()
    ours = case.run(FMA)
    assert ours.dtype == dtype
    assert_close(ours, exact, error)
    for config in (FMA, DOT) if dtype == torch.float16 or device.type == "cuda" else (FMA,):
        case = Case(device, 2, 40, 100, dtype)
        stream = case.hidden.float() * 1.0001
        exact, error = case.exact()
        total = stream.double() + exact
        assert case.run(config, add_to=stream) is stream
        assert_close(stream, total, error)


@pytest.mark.parametrize("is_gated", [False, True])
def test_every_shape_has_a_configuration_that_its_kernel_takes(is_gated):
    shapes = itertools.product(
        (1, 64, 960, 3072, 12288, 151936), (8, 576, 1024, 3000, 4096, 14336), (*range(1, 70), 128, 200, 256)
    )
    for num_outputs, num_inputs, n in shapes:
        config = choose(num_outputs, num_inputs, n, is_gated=is_gated)
        if isinstance(config, FmaConfig):
            assert n <= 4
            assert 1 <= config.block_outputs * config.block_inputs // config.num_warps <= 8192
        elif config is not None:
            assert n <= MAX_ROWS <= 4 * config.block_rows
            assert config.block_weights >= 32
    assert choose(1024, 1024, 0) is None
    assert choose(1024, 1024, MAX_ROWS + 1) is None
    assert isinstance(choose(1000, 1000, 1), FmaConfig)


def test_few_rows_of_a_large_weight_are_computed_like_more():
    """By FMA each of them would cost as much again as reading the weight."""
    for shape in ((6144, 4096), (4096, 12288), (2048, 8192), (5000, 5000)):
        assert choose(*shape, 2) == choose(*shape, 4) == choose(*shape, 32)
        assert isinstance(choose(*shape, 32), DotConfig)
        assert isinstance(choose(*shape, 1), FmaConfig)
    assert isinstance(choose(576, 576, 4), FmaConfig)
    assert choose(12288, 4096, 16, is_gated=True) == choose(12288, 4096, 2, is_gated=True)
    assert choose(12288, 4096, 17, is_gated=True) == choose(12288, 4096, 2, is_gated=True)
    assert choose(4096, 4096, 33) is None


def test_many_rows_of_a_small_models_weights_are_computed_here():
    for shape, is_gated in (((4096, 1024), False), ((3072, 1024), True)):
        for n in (33, 64, 65, 128, 129, 192, 193, 256):
            config = choose(*shape, n, is_gated=is_gated)
            assert isinstance(config, DotConfig)
            assert config.block_rows >= n or config.block_rows == 128
        assert choose(*shape, 257, is_gated=is_gated) is None


def test_whole_pieces_of_weights_are_asked_for():
    """The instruction takes addresses and sizes in 16 bytes; another one costs a GPU its context."""
    config = DotConfig(64, 128, 4, 4, 1, prefetched_inputs=512)
    memory = torch.zeros(101 * 64 + 8, dtype=torch.bfloat16)
    for shape, first, asked in (((64, 96), 0, 512), ((64, 96), 8, 512), ((64, 96), 4, 0), ((64, 100), 0, 0)):
        weight = memory[first : first + shape[0] * shape[1]].view(shape)
        assert weight.data_ptr() % 16 == 2 * first % 16
        assert num_prefetched_inputs(weight, config) == asked


@large
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 16, 24, 40, 64, 100, 250])
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "activation"),
    [
        *((outputs, inputs, None) for outputs, inputs in ((4096, 1024), (1024, 3072), (2048, 8192), (4096, 12288))),
        *((960, inputs, None) for inputs in (576, 896, 1152)),
        (151936, 1024, None),
        *((outputs, inputs, "silu") for outputs, inputs in ((3072, 1024), (8192, 2048), (12288, 4096), (1536, 576))),
        (6912, 1152, "gelu_tanh"),
    ],
)
def test_shapes_of_models_as_they_are_chosen(device, num_outputs, num_inputs, activation, n, dtype):
    config = choose(num_outputs, num_inputs, n, is_gated=activation is not None)
    if config is None:
        pytest.skip("it is cuBLAS's")
    norm = isinstance(config, FmaConfig)
    check(Case(device, n, num_outputs, num_inputs, dtype, norm=norm, activation=activation), config)


@large
def test_weights_beyond_two_to_the_31(device):
    """Offsets within a program are 32 bits wide, those of programs 64."""
    num_outputs = (1 << 31) // 8192 + 100
    x = torch.randn(2, 8192, device=device, dtype=torch.bfloat16)
    weight = torch.randn(num_outputs, 8192, device=device, dtype=torch.bfloat16)
    for config in (FmaConfig(4, 4096, 8), DotConfig(64, 128, 4, 4, 1)):
        ours = skinny_linear(x, weight, config)[:, -100:].double()
        exact = x.double() @ weight[-100:].double().T
        assert (ours - exact).norm() < 0.004 * exact.norm()


@large
@pytest.mark.parametrize(
    ("n", "config"),
    [
        *((n, FmaConfig(4, 1024, 2, trigger_late=late)) for n in (1, 4) for late in (False, True)),
        *((8, DotConfig(64, 128, 4, 4, splits, asked)) for splits in (1, 4) for asked in (0, 128, 4096)),
        *((200, DotConfig(64, 128, 4, 3, splits, block_rows=128)) for splits in (1, 4)),
    ],
    ids=str,
)
def test_a_chain_in_a_graph_reads_nothing_too_early(device, n, config):
    """Each product reads what the one before it wrote, while their launches overlap."""
    depth = 40
    weights = torch.randn(depth, 1024, 1024, device=device, dtype=torch.bfloat16) / 32
    counters = [new_split_k_counters(weight) for weight in weights]
    rows = torch.empty(depth + 1, n, 1024, device=device, dtype=torch.bfloat16)
    first = torch.randn(n, 1024, device=device, dtype=torch.bfloat16)

    def chain():
        for i in range(depth):
            skinny_linear(rows[i], weights[i], config, out=rows[i + 1], counters=counters[i])

    rows[0] = first
    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        rows.fill_(float("nan"))
        rows[0] = first
        graph.replay()
        exact = torch.bmm(rows[:-1].double(), weights.double().transpose(1, 2))
        assert (rows[1:].double() - exact).norm() < 0.005 * exact.norm()
