"""The kernels in C against torch, and what they promise: a row's result does not depend on the rows beside it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ringcore.kernels.native.attention_kernels import (
    AttentionStep,
    PageShape,
    attention_kernel,
    decode_items,
    split_items,
)
from ringcore.kernels.native.row_kernels import row_kernels
from ringcore.model_executor import ops

pytestmark = [pytest.mark.sampled, pytest.mark.skipif(row_kernels() is None, reason="no C compiler")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # relative: of the sums, of one rounding


def close(ours: torch.Tensor, right: torch.Tensor) -> bool:
    error = ERROR[ours.dtype]
    return torch.allclose(ours.double(), right.double(), rtol=error, atol=error)


def rows(n: int, size: int, dtype: torch.dtype = torch.float32, stride: int | None = None) -> torch.Tensor:
    made = torch.randn(n, stride or size, generator=torch.Generator().manual_seed(n + size)) * 3
    return made.to(dtype)[:, :size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "size", "stride"), [(1, 16, None), (3, 576, 600), (70, 1000, None), (2, 7, None)])
def test_rms_norm(n, size, stride, dtype):
    x, gain = rows(n, size, stride=stride), rows(1, size)[0]
    right = torch.nn.functional.rms_norm(x.double(), (size,), gain.double(), 1e-5)
    assert close(row_kernels().rms_norm(x, gain, 1e-5, dtype), right)
    to = rows(n, size + 5)[:, :size]
    expected = to + row_kernels().rms_norm(x, gain, 1e-5, dtype)
    row_kernels().add_rms_norm(x, gain, 1e-5, dtype, to)
    assert torch.equal(to, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "size"), [(1, 8), (5, 96), (65, 1536), (2, 37)])
def test_gates(n, size, dtype):
    x = rows(n, 2 * size, dtype, 2 * size + 3)
    gate, up = x.double().split(size, 1)
    assert close(row_kernels().silu_and_mul(x), torch.nn.functional.silu(gate) * up)
    right = torch.nn.functional.gelu(gate, approximate="tanh") * up
    assert close(row_kernels().gelu_tanh_and_mul(x), right)


def test_gates_of_large_numbers():
    x = torch.tensor([[-1e4, -200.0, 200.0, 1e4, 2.0, 2.0, 2.0, 2.0]])
    right = torch.tensor([[0.0, 0.0, 400.0, 2e4]])
    assert torch.allclose(row_kernels().silu_and_mul(x), right, rtol=1e-7, atol=1e-30)
    assert torch.allclose(row_kernels().gelu_tanh_and_mul(x), right, rtol=1e-7, atol=1e-30)
    assert row_kernels().silu_and_mul(x * float("nan")).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "heads", "kv_heads", "size"), [(1, 1, 1, 2), (4, 3, 1, 64), (33, 6, 2, 40)])
@pytest.mark.parametrize("has_norm", [False, True])
def test_rotations(n, heads, kv_heads, size, has_norm, dtype):
    total = heads + 2 * kv_heads
    x = rows(n, total * size, dtype, total * size + 5).unflatten(1, (total, size))
    angles = torch.polar(torch.ones(n, 1, size // 2), rows(n, size // 2).unsqueeze(1))
    gain = rows(2, size).abs() if has_norm else None
    right = x.double()
    if gain is not None:
        by_head = torch.cat((gain[:1].expand(heads, -1), gain[1:].expand(kv_heads, -1)))
        right[:, :-kv_heads] = torch.nn.functional.rms_norm(right[:, :-kv_heads], (size,), None, 1e-6) * by_head
        right = right.to(dtype).double() if dtype != torch.float32 else right
    pairs = torch.view_as_complex(right[:, :-kv_heads].unflatten(2, (-1, 2)).contiguous()) * angles
    right[:, :-kv_heads] = torch.view_as_real(pairs).flatten(2)
    row_kernels().rotate(x, angles, heads, kv_heads, gain, 1e-6)
    # A normalised number is rounded before it is rotated: the error is of the pair.
    assert torch.allclose(x.double(), right, rtol=2 * ERROR[dtype], atol=6 * ERROR[dtype])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_row_does_not_depend_on_the_rows_beside_it(num_threads):
    kernels, before = row_kernels(), torch.get_num_threads()
    x, gain = rows(200, 500), rows(1, 500)[0]
    alone = [kernels.rms_norm(row, gain, 1e-5, torch.float32) for row in x.split(1)]
    gates = [kernels.silu_and_mul(row) for row in x.split(1)]
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(kernels.rms_norm(x, gain, 1e-5, torch.float32), torch.cat(alone))
        assert torch.equal(kernels.silu_and_mul(x), torch.cat(gates))
    finally:
        torch.set_num_threads(before)


def attended(shape: PageShape, parts: list[int], kv: torch.Tensor, num_threads: int = 1) -> torch.Tensor:
    """A sequence whose tokens are computed in steps of so many: keys and values kv [2, tokens, heads, head_size]."""
    num_tokens, size = kv.shape[1], shape.block_size
    num_blocks = -(-num_tokens // size) + 1
    table = np.arange(num_blocks - 1, 0, -1)[None]  # not in their order
    pages = [torch.zeros(shape.num_kv_heads, num_blocks, 1, size, shape.head_size, dtype=kv.dtype) for _ in range(2)]
    query = torch.randn(num_tokens, shape.num_heads, shape.head_size, generator=torch.Generator().manual_seed(1))
    outs, first, before = [], 0, torch.get_num_threads()
    torch.set_num_threads(num_threads)
    for n in parts:
        places = np.arange(first, first + n)
        slots = torch.from_numpy(table[0][places // size] * size + places % size)
        step = AttentionStep(shape, np.array([0, n]), np.array([first + n]), table, slots)
        new = query.to(kv.dtype)[first : first + n], *kv[:, first : first + n]
        outs.append(torch.empty_like(new[0]))
        attention_kernel()(step, *new, pages, outs[-1], None, 0.125, 0.0)
        first += n
    torch.set_num_threads(before)
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (300, 0), (0, 700)])
def test_attention_is_the_same_however_a_prompt_is_cut_into_steps(window, chunk, dtype):
    """Also where a row's spans are several items', which long contexts of few rows are split into (split-KV)."""
    shape = PageShape(16, 64, 64, 6, 2, 1, window, chunk, dtype)
    kv = torch.randn(2, 1500, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = attended(shape, [1500], kv)
    assert torch.equal(attended(shape, [700, 1, 33, 500, 1, 1, 264], kv, num_threads=3), whole)
    assert torch.equal(attended(shape, [1499, 1], kv, num_threads=2), whole)


def test_a_window_of_many_spans_is_split_at_places_that_no_step_moves():
    """Tokens of one step begin to see at different spans."""
    shape = PageShape(16, 64, 64, 6, 2, 1, 1300, 0, torch.float32)
    kv = torch.randn(2, 2200, 2, 64, generator=torch.Generator().manual_seed(0))
    whole = attended(shape, [2200], kv)
    assert torch.equal(attended(shape, [1600, 1, 1, 300, 10, 288], kv), whole)


def test_long_contexts_of_few_rows_are_split():
    shape = PageShape(16, 64, 64, 6, 2, 1, 0, 0, torch.float32)
    items, num_partials, _ = split_items(shape, np.array([0, 1, 2]), np.array([5000, 40]))
    assert [tuple(item) for item in items] == [
        *((0, 0, 1, first, min(first + 4, 20), i * 3) for i, first in enumerate(range(0, 20, 4))),
        (1, 0, 1, 0, 1, -1),
    ]
    assert num_partials == 15


def test_a_window_is_read_from_its_first_span():
    shape = PageShape(16, 64, 64, 2, 2, 1, 100, 0, torch.float32)
    items, num_partials, _ = split_items(shape, np.array([0, 1]), np.array([5000]))
    assert items.tolist() == [[0, 0, 1, 19, 20, -1]]
    assert num_partials == 0


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (300, 0), (0, 512)])
def test_items_of_decodes_are_those_of_any_step(window, chunk):
    shape = PageShape(16, 64, 64, 6, 2, 1, window, chunk, torch.float32)
    generator = np.random.default_rng(0)
    for n in (1, 2, 17):
        starts = np.arange(n + 1, dtype=np.int32)
        for _ in range(20):
            lens = generator.integers(1, 1025, n).astype(np.int32)
            items, num_partials, num_operations = decode_items(shape, starts, lens)
            assert items.flags.c_contiguous
            assert items.dtype == np.int32
            expected, *numbers = split_items(shape, starts, lens)
            assert items.tolist() == expected.tolist()
            assert [num_partials, num_operations] == numbers
    assert decode_items(shape, np.array([0, 2]), np.array([5])) is None
    assert decode_items(shape, np.array([0, 1]), np.array([1025])) is None


def test_rotation_in_a_layer_is_the_complex_product():
    x, angles = rows(5, 4 * 16).unflatten(1, (4, 16)), torch.polar(torch.ones(5, 1, 8), rows(5, 8).unsqueeze(1))
    by_torch = x.clone()
    ops.apply_rotary(by_torch[:, :3], angles)
    row_kernels().rotate(x, angles, 2, 1)
    assert close(x, by_torch)
