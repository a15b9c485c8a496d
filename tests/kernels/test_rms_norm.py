"""RMSNorm against its definition in float64.

Tolerance: the kernel sums in float32, in another order and with the GPU's approximate root, which is off by some 1e-6;
then it rounds once (`rounding`).
"""

from __future__ import annotations

import pytest
import torch
from rounding import rounding, rounds_to_nearest

from ringcore.kernels.add_partials import add_partials
from ringcore.kernels.partials import Partials, RowNorm
from ringcore.kernels.rms_norm import MAX_SIZE, add_normed, rms_norm, rms_norm_reference

pytestmark = pytest.mark.sampled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6

large = pytest.mark.skipif(not torch.cuda.is_available(), reason="large shapes take the interpreter minutes")
SHAPES = [
    (1, 64),
    (5, 64),  # several rows a program, the last program not full
    (33, 128),
    (3, 1),
    (2, 100),
    (4, 576),
    (3, 1024),
    (2, 1025),
    (1, 5376),
    (2, MAX_SIZE),
    pytest.param((4096, 4096), marks=large),
    pytest.param((1023, 2048), marks=large),
    pytest.param((131072, 128), marks=large),
    pytest.param((140_000, 16384), marks=[large, pytest.mark.timeout(300)]),  # more than 2^31 numbers
]


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(dtype)


def poisoned(rows, size, dtype, device):
    """Room for `rows`, with some more rows behind it that nobody may write."""
    return torch.full((rows + 9, size), float("nan"), dtype=dtype, device=device)


def added(rows, weight):
    """Of which the norm is added."""
    return Partials(rows[None], norm=RowNorm(weight, EPS))


def assert_normed(ours, x, weight, eps=EPS):
    """Rows of at most 2^24 numbers at a time: float64 takes room."""
    assert ours.dtype == x.dtype
    rtol = rounding(x.dtype, x.device) + 4e-6
    rows = max(1, (1 << 24) // x.shape[1])
    for ours_now, x_now in zip(ours.split(rows), x.split(rows), strict=True):
        exact = x_now.double() * (x_now.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
        torch.testing.assert_close(ours_now.double(), exact, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows(device, shape, dtype):
    x, weight = randn(*shape, dtype=dtype, device=device), 1 + 0.3 * randn(shape[1], seed=1, device=device)
    if x.numel() > 1 << 31 and dtype != torch.bfloat16:
        pytest.skip("one dtype is enough of what is for the offsets alone")
    weight = weight.to(dtype)
    buffer = poisoned(*shape, dtype, device)
    out = buffer[: shape[0]]
    before = x[-1].clone()
    assert rms_norm(x, weight, EPS, out=out) is out
    assert_normed(out, x, weight)
    assert buffer[shape[0] :].isnan().all()
    assert torch.equal(x[-1], before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 64), (1, 576), (3, 1025), pytest.param((2048, 4096), marks=large)])
def test_added_to_the_stream(device, shape, dtype):
    x, hidden = (randn(*shape, seed=seed, dtype=dtype, device=device) for seed in (0, 1))
    weight = (1 + 0.3 * randn(shape[1], seed=2, device=device)).to(dtype)
    normed = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    total, kept = hidden.double() + normed, x.clone()
    stream = poisoned(*shape, dtype, device)
    stream[: shape[0]] = hidden
    assert add_normed(stream[: shape[0]], added(x, weight)).data_ptr() == stream.data_ptr()
    # Rounded once, as the sum; 4e-6 of the norm is its own error.
    room = 4e-6 * normed.abs() + rounding(dtype, device) * total.abs() * 1.001 + 1e-6
    assert ((stream[: shape[0]].double() - total).abs() <= room).all()
    assert stream[shape[0] :].isnan().all()
    assert torch.equal(x, kept)


@pytest.mark.parametrize("num_partials", [1, 2, 4])
@pytest.mark.parametrize("shape", [(5, 64), (33, 128), (3, 1025), pytest.param((256, 4096), marks=large)])
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("adds_norm", [False, True])
def test_partials_are_added_first(device, shape, num_partials, is_weighted, adds_norm):
    """Those of a product are one after the other; with weights, as of experts, those of a row are."""
    stream = poisoned(*shape, torch.float32, device)
    x = stream[: shape[0]].copy_(randn(*shape, device=device))
    rows, weight = randn(num_partials, *shape, seed=1, device=device), randn(shape[1], seed=2, device=device)
    partials, of_rows, kept = Partials(rows), rows.double().sum(0), rows.clone()
    if is_weighted:
        weights = randn(shape[0], num_partials, seed=3, device=device)
        partials = Partials(rows.transpose(0, 1).contiguous().transpose(0, 1), weights)
        of_rows = torch.einsum("pns,np->ns", rows.double(), weights.double())
    if adds_norm:
        gain = 1 + 0.3 * randn(shape[1], seed=4, device=device)
        partials = partials._replace(norm=RowNorm(gain, EPS))
        of_rows *= (of_rows.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain.double()
    total = x.double() + of_rows
    reference = x.clone()
    exact = rms_norm_reference(reference, weight, EPS, partials=partials)
    ours = rms_norm(x, weight, EPS, partials=partials)
    assert ours.data_ptr() != x.data_ptr()
    for stream_now, normed in ((x, ours), (reference, exact)):
        torch.testing.assert_close(stream_now.double(), total, atol=4e-6, rtol=4e-6)
        assert_normed(normed, stream_now, weight)
    assert torch.equal(partials.rows, kept)
    assert stream[shape[0] :].isnan().all()
    narrow = rms_norm(x, weight.half(), EPS, partials=Partials(torch.zeros_like(rows)), dtype=torch.float16)
    torch.testing.assert_close(narrow.float(), ours, atol=1e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_add_that_no_norm_takes_is_a_launch(device, dtype):
    x, rows = randn(3, 1100, dtype=dtype, device=device), randn(2, 3, 1100, seed=1, device=device)
    weights = randn(3, 2, seed=2, device=device)
    for partials in (Partials(rows), Partials(rows.half(), weights)):
        expected, found = x.float() + partials.total(), x.clone()
        add_partials(found, partials)
        torch.testing.assert_close(found, expected.to(dtype), atol=1e-5, rtol=1e-3 if dtype == torch.float16 else 1e-5)


def test_partials_are_of_the_stream(device):
    x, weight = randn(4, 64, device=device), torch.ones(64, device=device)
    fitting = randn(2, 4, 64, device=device)
    others = Partials(fitting[:, :3]), Partials(fitting, torch.ones(4, 3, device=device))
    for rows, partials in ((x, others[0]), (x, others[1]), (x.half(), Partials(fitting))):
        with pytest.raises(AssertionError):
            rms_norm(rows, weight, EPS, partials=partials)
    narrow = randn(1, 4, 64, device=device).half()
    expected = x + narrow[0]
    rms_norm(x, weight, EPS, partials=Partials(narrow))
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_between_a_stream_of_float32_and_16_bits(device, dtype):
    x, weight = randn(5, 576, device=device), randn(576, seed=1, dtype=dtype, device=device)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    ours = rms_norm(x, weight, EPS, dtype=dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=rounding(dtype, device) + 4e-6)
    stream, narrow = randn(5, 576, seed=2, device=device), x.to(dtype)
    total = stream.double() + rms_norm_reference(narrow.double().float(), weight, EPS).double()
    before = stream.clone()
    assert add_normed(stream, added(narrow, weight)) is stream
    torch.testing.assert_close(stream.double(), total, atol=1e-5, rtol=1e-5)
    rounded = add_normed(before, added(narrow, weight), dtype)
    assert torch.equal(before, stream)
    torch.testing.assert_close(rounded.float(), stream, atol=0, rtol=rounding(dtype, device))
    assert rms_norm_reference(x, weight, EPS, dtype=dtype).dtype == dtype


def test_the_reference_is_the_definition(device):
    x = randn(3, 40, device=device)
    weight = randn(40, seed=2, device=device)
    ours = rms_norm_reference(x, weight, EPS)
    assert_normed(ours, x, weight)
    assert torch.equal(rms_norm_reference(x, weight, EPS, out=torch.empty_like(x)), ours)
    torch.testing.assert_close(added(x, weight).total(), ours)


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_reference_agree(device, dtype):
    x, hidden = (randn(7, 192, seed=seed, dtype=dtype, device=device) for seed in (0, 1))
    weight = randn(192, seed=2, device=device)
    # Where float32 sums fall on the two sides of a rounding, one unit apart.
    rtol = 1e-5 + 2 * rounding(dtype, x.device) * (dtype != torch.float32)
    torch.testing.assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS), atol=1e-6, rtol=rtol)
    expected = (hidden.float() + added(x, weight).total()).to(dtype)
    torch.testing.assert_close(add_normed(hidden, added(x, weight)), expected, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_float32_is_not_rounded(device, dtype):
    """Gemma's 1 + weight: 1 + 2^-10 is 1 in bfloat16, and the result would be off by more than its own rounding."""
    x = randn(4, 256, dtype=dtype, device=device)
    weight = 1 + 0.3 * randn(256, seed=1, device=device).to(dtype).float()
    weight[::2] = 1 + 2.0**-10
    ours = rms_norm(x, weight, EPS)
    assert_normed(ours, x, weight)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
    if rounds_to_nearest(dtype, device):
        assert (ours == exact.to(dtype)).double().mean() > 0.99


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-4, 1e15])
def test_extreme_rows(device, scale):
    """eps decides for tiny rows, and none gives a NaN."""
    x, weight = randn(2, 96, device=device) * scale, torch.ones(96, device=device)
    assert_normed(rms_norm(x, weight, 1e-5), x, weight, eps=1e-5)


def test_a_row_that_is_not_finite_is_alone(device):
    x, weight = randn(4, 64, device=device), torch.ones(64, device=device)
    x[1, 7] = float("inf")
    x[2, 0] = float("nan")
    ours = rms_norm(x, weight, EPS)
    assert ours[[0, 3]].isfinite().all()
    assert ours[1, 7].isnan()
    assert ours[2].isnan().all()


def test_out_may_be_the_input(device):
    x, weight = randn(5, 96, device=device), randn(96, seed=2, device=device)
    expected = rms_norm(x, weight, EPS)
    assert rms_norm(x, weight, EPS, out=x) is x
    assert torch.equal(x, expected)
    with pytest.raises(AssertionError, match="no norm"):
        add_normed(x, Partials(x[None]))


def test_no_rows(device):
    hidden = torch.empty(0, 64, device=device)
    assert rms_norm(hidden, torch.ones(64, device=device), EPS).shape == (0, 64)


def test_rows_must_lie_side_by_side(device):
    with pytest.raises(AssertionError, match="contiguous"):
        rms_norm(randn(4, 64, device=device)[:, :32], torch.ones(32, device=device), EPS)
