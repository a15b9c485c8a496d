"""Head norms, rotation and the write of keys and values against the reference in float64.

Tolerance: float32 throughout, with the GPU's approximate root (some 1e-6 of the size of a pair), and one rounding.
"""

from __future__ import annotations

import pytest
import torch
from rounding import rounding

from ringcore.kernels.attention.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference

pytestmark = pytest.mark.sampled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-6
NUM_POSITIONS = 50

large = pytest.mark.skipif(not torch.cuda.is_available(), reason="large shapes take the interpreter minutes")


def randn(*shape, seed, device):
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)


class Case:
    """Random inputs of one shape, and what they should come to."""

    def __init__(self, device, n, heads, kv_heads, head_dim, dtype, block_size=4, norm=True):
        self.shape = n, heads, kv_heads, head_dim
        num_all = heads + 2 * kv_heads
        self.qkv = randn(n, num_all * head_dim, seed=n, device=device).to(dtype)
        generator = torch.Generator().manual_seed(head_dim)
        self.positions = torch.randint(NUM_POSITIONS, (n,), generator=generator).to(device)
        angles = 7 * randn(NUM_POSITIONS, head_dim // 2, seed=1, device=device)
        # With a factor, as yarn has it.
        self.cos_sin = 0.9 * torch.stack((angles.cos(), angles.sin()), -1).flatten(1)
        self.weight = 1 + 0.3 * randn(2, head_dim, seed=2, device=device) if norm else None
        num_blocks = n // block_size + 3
        self.slots = (torch.randperm((num_blocks - 1) * block_size, generator=generator)[:n] + block_size).to(device)
        self.pages = torch.full(
            (num_blocks, 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=device
        )

    def options(self):
        return {"norm_weight": self.weight, "eps": EPS}

    def run(self, **options):
        _, heads, kv_heads, _ = self.shape
        return qk_norm_rope(self.qkv, self.positions, self.cos_sin, heads, kv_heads, **self.options() | options)

    def expected(self):
        """[n, all heads, head_dim] float64: not rounded."""
        n, heads, kv_heads, head_dim = self.shape
        x = self.qkv.double().view(n, -1, head_dim)
        rotated = x[:, : heads + kv_heads]
        if self.weight is not None:
            gain = torch.cat([row.expand(count, -1) for row, count in zip(self.weight, (heads, kv_heads), strict=True)])
            rotated = rotated * (rotated.square().mean(-1, keepdim=True) + EPS).rsqrt() * gain.double()
        cos, sin = self.cos_sin[self.positions].double().view(n, 1, -1, 2).unbind(-1)
        first, second = rotated[..., ::2], rotated[..., 1::2]
        rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(2)
        return torch.cat((rotated, x[:, heads + kv_heads :]), dim=1)


def assert_rounded(ours, exact):
    rtol = rounding(ours.dtype, ours.device) + 4e-6
    torch.testing.assert_close(ours.double(), exact, atol=4e-6, rtol=rtol)


def assert_pages(case, exact):
    """Keys and values in their slots, and nothing anywhere else."""
    _, heads, kv_heads, _ = case.shape
    block_size = case.pages.shape[3]
    blocks, offsets = case.slots // block_size, case.slots % block_size
    keys, values = exact[:, heads:].split(kv_heads, dim=1)
    assert_rounded(case.pages[blocks, 0, :, offsets], keys)
    assert torch.equal(case.pages[blocks, 1, :, offsets].double(), values)
    case.pages[blocks, :, :, offsets] = float("nan")
    assert case.pages.isnan().all()


SHAPES = [
    (1, 1, 1, 64),
    (3, 4, 2, 16),
    (2, 9, 3, 64),
    (5, 2, 2, 96),
    (1, 8, 1, 128),
    (2, 6, 2, 128),
    (3, 4, 1, 256),
    (1, 16, 4, 80),
    pytest.param((1, 32, 8, 128), marks=large),
    pytest.param((4096, 32, 8, 128), marks=large),
    pytest.param((1000, 14, 2, 64), marks=large),
    pytest.param((700, 40, 8, 96), marks=large),
    pytest.param((500, 8, 4, 256), marks=large),
    *(pytest.param((256, 4 * group, 4, 128), marks=large) for group in range(1, 9)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_place_and_into_the_pages(device, shape, norm, dtype):
    case = Case(device, *shape, dtype, norm=norm)
    n, heads, kv_heads, head_dim = shape
    exact, values = case.expected(), case.qkv.view(n, -1, head_dim)[:, heads + kv_heads :].clone()
    assert case.run(kv_cache=case.pages, slot_mapping=case.slots) is case.qkv
    ours = case.qkv.view(n, -1, head_dim)
    assert_rounded(ours, exact)
    assert torch.equal(ours[:, heads + kv_heads :], values)
    assert_pages(case, exact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 4, 2, 32), (1, 5, 5, 96), pytest.param((777, 28, 4, 128), marks=large)])
def test_without_pages(device, shape, dtype):
    case = Case(device, *shape, dtype)
    n, _, _, head_dim = shape
    exact, before = case.expected(), case.qkv.clone()
    buffer = torch.full((n + 2, case.qkv.shape[1]), float("nan"), dtype=dtype, device=device)
    out = buffer[:n]
    assert case.run(out=out) is out
    assert_rounded(out.view(n, -1, head_dim), exact)  # with the values beside them
    assert torch.equal(case.qkv, before)
    assert buffer[n:].isnan().all()
    case.run()
    assert torch.equal(case.qkv, out)


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_reference_agree(device, dtype, norm):
    case, other = (Case(device, 4, 6, 2, 64, dtype, norm=norm) for _ in range(2))
    exact = case.expected()
    case.run(kv_cache=case.pages, slot_mapping=case.slots)
    reference = qk_norm_rope_reference(
        *(other.qkv, other.positions, other.cos_sin, 6, 2),
        **other.options(),
        kv_cache=other.pages,
        slot_mapping=other.slots,
    )
    assert reference is other.qkv
    # Where float32 numbers fall on the two sides of a rounding, one unit apart.
    rtol = 1e-5 + 2 * rounding(dtype, case.qkv.device) * (dtype != torch.float32)
    torch.testing.assert_close(case.qkv, other.qkv, atol=4e-6, rtol=rtol)
    assert_rounded(other.qkv.view(4, -1, 64), exact)
    assert_pages(case, exact)
    assert_pages(other, exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_by_token_are_those_of_the_positions(device, dtype):
    case, other = (Case(device, 5, 4, 2, 32, dtype) for _ in range(2))
    case.run(kv_cache=case.pages, slot_mapping=case.slots)
    other.cos_sin, other.positions = other.cos_sin[other.positions], None
    other.run(kv_cache=other.pages, slot_mapping=other.slots)
    assert torch.equal(case.qkv, other.qkv)
    assert torch.equal(case.pages.nan_to_num(7), other.pages.nan_to_num(7))
    reference = Case(device, 5, 4, 2, 32, dtype)
    ours = qk_norm_rope_reference(reference.qkv, None, other.cos_sin, 4, 2, **reference.options())
    rtol = 1e-5 + 2 * rounding(dtype, case.qkv.device) * (dtype != torch.float32)
    torch.testing.assert_close(case.qkv, ours, atol=4e-6, rtol=rtol)


@pytest.mark.parametrize("block_size", [1, 16])
def test_block_sizes(device, block_size):
    case = Case(device, 5, 4, 2, 32, torch.bfloat16, block_size)
    exact = case.expected()
    case.run(kv_cache=case.pages, slot_mapping=case.slots)
    assert_pages(case, exact)


def test_tokens_that_share_the_null_block(device):
    """Their slots are written by whoever comes last; the other pages are what they should be."""
    case = Case(device, 6, 2, 1, 32, torch.bfloat16)
    case.slots[[1, 4]] = torch.tensor([0, 0], device=device)
    exact = case.expected()
    case.run(kv_cache=case.pages, slot_mapping=case.slots)
    assert case.pages[0, :, :, 0].isfinite().all()
    case.pages[0] = float("nan")
    kept = [0, 2, 3, 5]
    case.slots, case.shape = case.slots[kept], (4, *case.shape[1:])
    assert_pages(case, exact[kept])


def test_large_angles_and_far_positions(device):
    """Row and slot numbers beyond 2^31 elements are 64 bits wide: here as the table's far end."""
    case = Case(device, 2, 2, 1, 64, torch.float32)
    case.positions[:] = NUM_POSITIONS - 1
    exact = case.expected()
    case.run()
    assert_rounded(case.qkv.view(2, -1, 64), exact)


@large
def test_pages_beyond_two_to_the_31(device):
    case = Case(device, 3, 4, 2, 128, torch.bfloat16, block_size=16)
    num_blocks = (1 << 31) // (2 * 2 * 16 * 128) + 2
    pages = torch.zeros(num_blocks, 2, 2, 16, 128, dtype=torch.bfloat16, device=device)
    slots = torch.tensor([16, num_blocks * 16 - 1, (num_blocks - 1) * 16], device=device)
    exact = case.expected()
    case.run(kv_cache=pages, slot_mapping=slots)
    assert_rounded(pages[slots // 16, 0, :, slots % 16], exact[:, 4:6])
    assert int(pages.count_nonzero()) <= 3 * 2 * 2 * 128


def test_keys_that_overflow_are_finite_in_the_pages(device):
    """Of float16: attention gives what it masks the weight 0, and 0 * infinity is NaN."""
    case = Case(device, 2, 2, 1, 32, torch.float16)
    case.weight[1] = 1e5
    case.qkv[1, -1] = float("nan")
    case.run(kv_cache=case.pages, slot_mapping=case.slots)
    assert case.qkv.isinf().any()
    written = case.pages[case.slots // 4, :, :, case.slots % 4]
    assert written.isfinite().all()
    assert written.abs().max() == torch.finfo(torch.float16).max
    assert written[1, 1, 0, -1] == 0


def test_no_tokens(device):
    case = Case(device, 0, 4, 2, 32, torch.bfloat16)
    assert case.run(kv_cache=case.pages, slot_mapping=case.slots).shape == (0, 8 * 32)
    assert case.pages.isnan().all()


def test_the_heads_must_fill_a_row(device):
    case = Case(device, 2, 4, 2, 32, torch.bfloat16)
    with pytest.raises(AssertionError):
        qk_norm_rope(case.qkv, case.positions, case.cos_sin, 4, 1)
