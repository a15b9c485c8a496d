"""The kernels that adjust logits and count tokens against their references in torch: equal, bit by bit.

No operation is fused with another, and each is rounded as IEEE 754 has it, so there is no tolerance.
"""

from __future__ import annotations

import itertools
import math

import adjusted_by_eye as eye
import numpy as np
import pytest
import torch
from adjusted_rows import Row, adjustments_of, assert_same, by_hand, random_logits, random_rows
from sampling_rows import inputs
from test_precompile import run
from test_sampling import check

from ringcore.kernels.logits import logit_adjustments as kernels
from ringcore.kernels.logits.sampling import DeviceSamplingInputs, sample_tokens
from ringcore.model_executor import logit_adjustments as reference

ON_GPU = torch.cuda.is_available()
PARTS = [
    dict(zip(("bias", "penalties", "masks"), on, strict=True)) for on in itertools.product((True, False), repeat=3)
]


def check_rows(rows: list[Row], logits: torch.Tensor, device: torch.device, **parts: bool) -> torch.Tensor:
    """The kernel's rows, which are those of the reference: in new memory, and in place where that is possible."""
    vocab_size = logits.shape[1]
    expected = reference.adjust_logits(logits, adjustments_of(rows, vocab_size), **parts)
    adjustments = adjustments_of(rows, vocab_size, device)
    given = logits.to(device, copy=True)
    before = given.clone()
    found = kernels.adjust_logits(given, adjustments, **parts)
    assert_same(found, expected)
    assert torch.equal(given.view(torch.uint8), before.view(torch.uint8)), "the logits were changed"
    if logits.dtype == torch.float32:
        assert kernels.adjust_logits(given, adjustments, out=given, **parts) is given
        assert_same(given, expected)
    return found


@pytest.mark.parametrize("vocab_size", [1, 8, 31, 32, 33, 500, 2048, 2049, 4128])
def test_any_vocabulary(vocab_size: int, device: torch.device) -> None:
    check_rows(random_rows(8, vocab_size, seed=vocab_size), random_logits(8, vocab_size, seed=vocab_size), device)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # inf - inf of numpy's scalars
@pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "+".join(name for name in parts if parts[name]) or "nothing")
def test_each_part_and_rows_as_by_hand(parts: dict[str, bool], device: torch.device) -> None:
    rows, logits = random_rows(9, 77, seed=5), random_logits(9, 77, seed=5)
    found = check_rows(rows, logits, device, **parts)
    by_token = [by_hand(x, row, **parts) for x, row in zip(logits.tolist(), rows, strict=True)]
    assert_same(found, torch.from_numpy(np.array(by_token, np.float32)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_widened(dtype: torch.dtype, device: torch.device) -> None:
    check_rows(random_rows(6, 300, seed=6), random_logits(6, 300, seed=6).to(dtype), device)


def test_rows_may_be_part_of_wider_tensors(device: torch.device) -> None:
    rows = random_rows(5, 100, seed=7)
    wide, wide_out = random_logits(5, 160, seed=7), torch.full((5, 130), 5.0, device=device)
    logits, out = wide.to(device)[:, 30:130], wide_out[:, 7:107]
    assert kernels.adjust_logits(logits, adjustments_of(rows, 100, device), out=out) is out
    assert_same(out, reference.adjust_logits(wide[:, 30:130], adjustments_of(rows, 100)))
    assert (wide_out[:, :7] == 5).all()
    assert (wide_out[:, 107:] == 5).all()


def test_rows_without_adjustments_are_copied(device: torch.device) -> None:
    logits = random_logits(4, 100, seed=8)
    out = torch.full((4, 100), 5.0, device=device)
    kernels.adjust_logits(logits.to(device), adjustments_of([Row()] * 4, 100, device), out=out)
    assert_same(out, logits)


@pytest.mark.parametrize("first", [0, 1000])
@pytest.mark.parametrize("num_bias", [1, 2, 3, 1024, 1500])
def test_biases_of_neighbours(num_bias: int, first: int, device: torch.device) -> None:
    """As many as may be given, and more than are looked at at once; all in one tile, or across the edge of one."""
    bias = {first + i: float(np.float32(math.sin(i) * 50)) for i in range(num_bias)}
    rows = [Row(bias=bias), Row(bias={token + 1: value for token, value in bias.items()})]
    check_rows(rows, random_logits(2, 3000, seed=9), device, penalties=False, masks=False)


def test_biases_far_apart(device: torch.device) -> None:
    rows = [Row(bias={0: 1.0, 2047: 2.0, 2048: 3.0, 4095: 4.0}), Row(bias={2048: -1.0}), Row(bias={4099: 7.0})]
    found = check_rows(rows, torch.zeros(3, 4100), device)
    assert [row.nonzero()[:, 0].tolist() for row in found.cpu()] == [[0, 2047, 2048, 4095], [2048], [4099]]


def test_counts_of_any_size(device: torch.device) -> None:
    """What the prompt has is told from what was generated, up to the last count before that bit."""
    adjustments = adjustments_of([Row(repetition=1.5, frequency=0.3, presence=-1.0)], 6, device)
    counts = torch.tensor([0, 1, 2**24 + 3, 2**30 - 1, kernels.IN_PROMPT, kernels.IN_PROMPT + 2**30 - 1])
    adjustments.counts[1] = counts.int()
    logits = torch.tensor([[3.0, -3.0, 3.0, -3.0, 3.0, -3.0]], device=device)
    found = kernels.adjust_logits(logits, adjustments)
    times = np.array([0, 1, 2**24 + 3, 2**30 - 1, 0, 2**30 - 1]).astype(np.float32)
    expected = np.array([3, -4.5, 2, -4.5, 2, -4.5], np.float32) - np.float32(0.3) * times
    assert_same(found, torch.from_numpy(np.where(times > 0, expected + np.float32(1), expected))[None])


def test_rows_may_share_what_they_ask_for(device: torch.device) -> None:
    """As the completions of one prompt do: the same biases, mask and counts."""
    asked = adjustments_of(random_rows(2, 60, seed=10)[1:], 60, device)
    tables = {name: getattr(asked, name) for name in ("counts", "bias_ids", "bias_values", "masks")}
    columns = {name: getattr(asked, name).expand(3).contiguous() for name in asked.__slots__ if name not in tables}
    logits = random_logits(1, 60, seed=10).to(device)
    found = kernels.adjust_logits(logits.expand(3, -1).contiguous(), kernels.LogitAdjustments(**columns, **tables))
    assert_same(found, kernels.adjust_logits(logits, asked).expand(3, -1))


def test_more_rows_of_adjustments_than_of_logits(device: torch.device) -> None:
    rows, logits = random_rows(6, 70, seed=11), random_logits(6, 70, seed=11).to(device)
    adjustments = adjustments_of(rows, 70, device)
    assert_same(kernels.adjust_logits(logits[:2], adjustments), kernels.adjust_logits(logits, adjustments)[:2])
    assert kernels.adjust_logits(logits[:0], adjustments).shape == (0, 70)


@pytest.mark.parametrize("n", [1, 5, 300])
def test_tokens_are_counted_in_the_slots_of_their_rows(n: int, device: torch.device) -> None:
    rng = np.random.default_rng(n)
    slots = torch.from_numpy(np.where(rng.random(n) < 0.7, rng.permutation(n + 3)[:n], -1).astype(np.int32))
    tokens = torch.from_numpy(rng.integers(0, 33, n))
    expected = torch.from_numpy(rng.integers(0, 5, (n + 3, 33), np.int32)) + kernels.IN_PROMPT
    found = expected.to(device, copy=True)
    for _ in range(2):
        reference.count_tokens(expected, slots, tokens)
        kernels.count_tokens(found, slots.to(device), tokens.to(device))
    assert torch.equal(found.cpu(), expected)


def test_no_rows_count_nothing(device: torch.device) -> None:
    counts = torch.zeros(1, 5, dtype=torch.int32, device=device)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    kernels.count_tokens(counts, nothing, nothing.long())
    assert not counts.any()


@pytest.mark.parametrize(("filters", "weights"), eye.STAGES, ids=str)
def test_draws_by_eye(filters: dict[str, float], weights: list[float], device: torch.device) -> None:
    """The tokens that a row by hand leaves, and those that the CPU draws with it."""
    n = 1000 if ON_GPU else 2
    adjusted = kernels.adjust_logits(eye.logits(n).to(device), adjustments_of([eye.ROW] * n, 8, device))
    drawn = check(adjusted.cpu(), inputs(n, **filters), device)
    assert (torch.tensor(weights)[drawn] > 0).all()


def test_rows_with_nothing_to_sample_and_broken_rows_are_not_ok(device: torch.device) -> None:
    logits = torch.zeros(4, 40)
    logits[2, 7] = math.nan
    some = frozenset({3, 39})
    rows = [Row(allowed=frozenset()), Row(allowed=some), Row(allowed=some), Row(allowed=frozenset({39}))]
    adjusted = kernels.adjust_logits(logits.to(device), adjustments_of(rows, 40, device))
    for filters in ({"temperature": 0.0}, {}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}):
        placed = DeviceSamplingInputs.from_host(inputs(4, **filters), device)
        token_ids, ok = sample_tokens(adjusted, placed)
        assert ok.tolist() == [False, True, False, True]
        assert int(token_ids[1]) in some
        assert token_ids[3] == 39


def test_batches_of_any_size_share_what_is_compiled(tmp_path) -> None:
    """Whatever the number of rows and wherever their columns begin; and what is compiled compiles for a GPU."""
    script = """
        import torch, triton_for_sm90
        from adjusted_rows import Row, adjustments_of
        from ringcore.kernels.logits.logit_adjustments import LogitAdjustments, adjust_logits, count_tokens
        from ringcore.kernels.launch.precompile import intercept_launches, compile_variants

        def shifted(tensor):  # by one element: aligned for nothing but that
            return torch.cat((tensor[:1], tensor))[1:]

        with intercept_launches() as caught:
            for n in (1, 2, 7, 16):
                given = adjustments_of([Row(bias={1: 1.0}, repetition=2.0)] * n, 160)
                tables = {"counts": given.counts, "masks": given.masks}
                names = [name for name in LogitAdjustments.__slots__ if name not in tables]
                for move in (shifted, torch.clone):
                    moved = LogitAdjustments(**{name: move(getattr(given, name)) for name in names}, **tables)
                    logits = torch.zeros(n, 160)
                    adjust_logits(logits, moved, out=logits)
                    adjust_logits(logits.bfloat16(), moved)
                    count_tokens(given.counts, moved.counts_slot, move(torch.zeros(n, dtype=torch.int64)))
        variants = list(caught.values())
        print(*sorted(variant.kernel.__name__ for variant in variants))
        compile_variants(variants, torch.device("cpu"), 1)
    """
    assert run(script, tmp_path).split() == ["_adjust_kernel", "_adjust_kernel", "_count_kernel"]
    texts = [path.read_text() for path in tmp_path.rglob("_adjust_kernel.ptx")]
    assert len(texts) == 2
    assert not any("fma.rn" in text for text in texts), "two operations are rounded as one"
