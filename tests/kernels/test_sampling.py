"""The sampling kernels against the sampler on the CPU: the same random numbers, so the same tokens.

Tokens are compared for equality. The two differ only in the rounding of exp and of sums, a few parts in 10^7; a draw
comes out otherwise where two of its tokens are as close as that, about once in a million draws. So up to `ALLOWED` of
the thousands of rows on a GPU may differ, and none of the few in the interpreter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from sampling_rows import inputs

from ringcore.kernels.logits import sampling
from ringcore.kernels.logits.sampling import DeviceSamplingInputs, SamplingWorkspace, sample_tokens
from ringcore.kernels.logits.sampling_draw import exp_of, exponentials
from ringcore.model_executor.sampler import SamplingInputs, sample, token_logprobs, uniforms
from ringcore.protocol.row_parameters import ROW_PARAMETERS

pytestmark = pytest.mark.sampled

ON_GPU = torch.cuda.is_available()
ROWS = 4000 if ON_GPU else 2
ALLOWED = 2 if ON_GPU else 0
gpu_only = pytest.mark.skipif(not ON_GPU, reason="too large for Triton's interpreter")


def random_logits(n: int, vocab_size: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def on_device(
    logits: torch.Tensor, columns: SamplingInputs, device: torch.device, **reused: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' answer, back on the host; outputs and workspace hold rubbish before."""
    n, vocab_size = logits.shape
    workspace = SamplingWorkspace.allocate(n, vocab_size, device)
    workspace.maxima.fill_(math.nan), workspace.sums.fill_(math.nan), workspace.candidates.fill_(math.nan)
    workspace.best_ids.fill_(-(2**30)), workspace.group_ids.fill_(2**30)
    token_ids = torch.full((n,), -1, dtype=torch.int64, device=device)
    ok = torch.zeros(n, dtype=torch.bool, device=device)
    placed = reused.get("placed") or DeviceSamplingInputs.from_host(columns, device)
    before = logits.to(device)
    after = before.clone()
    found = sample_tokens(after, placed, token_ids=token_ids, ok=ok, workspace=workspace)
    assert found[0] is token_ids
    assert found[1] is ok
    assert torch.equal(after.view(torch.uint8), before.view(torch.uint8)), "the logits were changed"
    return token_ids.cpu(), ok.cpu()


def check(logits: torch.Tensor, columns: SamplingInputs, device: torch.device, allowed: int = ALLOWED) -> torch.Tensor:
    """The kernels' tokens, which are those of the CPU."""
    expected = sample(logits.float(), columns)
    token_ids, ok = on_device(logits, columns, device)
    assert ok.tolist() == expected.ok.tolist()
    assert ((token_ids >= 0) & (token_ids < logits.shape[1])).all()
    different = (token_ids != expected.token_ids)[ok].nonzero()[:, 0]
    assert len(different) <= allowed, (different.tolist(), token_ids[different], expected.token_ids[different])
    return token_ids


@triton.jit
def exponentials_kernel(seed, position, out, size: tl.constexpr):
    i = tl.program_id(0)
    columns = tl.arange(0, size)
    tl.store(out + i * size + columns, exponentials(tl.load(seed + i), tl.load(position + i), columns))


@triton.jit
def exp_kernel(x, out, size: tl.constexpr):
    columns = tl.arange(0, size)
    tl.store(out + columns, exp_of(tl.load(x + columns)))


def test_the_random_numbers_are_those_of_the_cpu(device: torch.device) -> None:
    """Seeds and positions of more than 32 bits too. The tolerance is that of two libraries' logarithms."""
    seed, position = np.array([0, 7, 2**62 + 7, 2**63 - 1]), np.array([0, 3, 2**40 + 1, 131072])
    out = torch.full((4, 256), math.nan, dtype=torch.float64, device=device)
    exponentials_kernel[(4,)](torch.from_numpy(seed).to(device), torch.from_numpy(position).to(device), out, size=256)
    torch.testing.assert_close(out.cpu(), -uniforms(seed, position, 256).log(), rtol=1e-14, atol=1e-18)


def test_weights_are_exact_to_an_ulp_or_two(device: torch.device) -> None:
    d = -torch.cat((torch.linspace(0, 86.9, 1000), torch.logspace(-9, 0, 1020), torch.tensor([0, 88, 1e30, math.inf])))
    out = torch.full((2048,), math.nan, device=device)
    given = torch.nn.functional.pad(d.float(), (0, 2048 - len(d)))
    exp_kernel[(1,)](given.to(device), out, size=2048)
    exact = given.double().exp()
    exact[given <= -87] = 0
    torch.testing.assert_close(out.cpu().double(), exact, rtol=2.5e-7, atol=0)
    assert (out.cpu()[given == 0] == 1).all()
    tiny = (given > -1e-6) & (given < 0)
    assert torch.equal(out.cpu()[tiny], exact[tiny].float()), "nearly equal logits must tie as exact arithmetic has it"


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 31, 32, 33, 100, 257, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_vocabulary(vocab_size: int, temperature: float, device: torch.device) -> None:
    n = 300 if ON_GPU else 2
    check(random_logits(n, vocab_size, seed=vocab_size), inputs(n, temperature=temperature), device)


@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 0.3, 2.0, 50.0, 1e6, 1e9])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.8, "min_p": 0.01}], ids=["free", "filtered"])
def test_any_temperature(temperature: float, filters: dict[str, float], device: torch.device) -> None:
    """At 1e6 the weights differ by an ulp or two, and the CPU's exp is not always rounded to the nearest: what ties
    with the last token kept differs in one row of some 300."""
    allowed = ROWS // 50 if temperature >= 1e6 and filters else ALLOWED
    check(random_logits(ROWS, 200, seed=1), inputs(ROWS, temperature=temperature, **filters), device, allowed)


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 17},
        {"top_k": 40},  # more than there are groups
        {"top_k": 500},
        {"top_k": 501},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-6},
        {"top_p": 0.3},
        {"top_p": 0.9},
        {"top_p": 0.9999999},
        {"min_p": 1.0},
        {"min_p": 0.05},
        {"min_p": 1e-30},
        {"top_k": 30, "top_p": 0.5},
        {"top_k": 200, "top_p": 0.999},
        {"top_k": 30, "min_p": 0.1},
        {"top_p": 0.8, "min_p": 0.001},
        {"top_p": 0.2, "min_p": 0.2},
        {"top_k": 10, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
def test_filters(filters: dict[str, float], device: torch.device) -> None:
    n = ROWS // 2
    check(random_logits(n, 501, seed=2), inputs(n, temperature=1.3, **filters), device)


def test_rows_with_parameters_of_their_own(device: torch.device) -> None:
    rng = np.random.default_rng(3)
    n = max(12, ROWS)
    columns = inputs(
        n,
        temperature=rng.choice([0, 0.5, 1, 1.7], n),
        top_k=rng.choice([0, 0, 1, 5, 60], n),
        top_p=rng.choice([1, 1, 0.01, 0.5, 0.95], n),
        min_p=rng.choice([0, 0, 0.03, 0.5], n),
        seed=rng.integers(0, 2**63 - 1, n),
        position=rng.integers(0, 200_000, n),
    )
    check(random_logits(n, 333, seed=3), columns, device)


def levels(n: int, vocab_size: int, num_levels: int) -> torch.Tensor:
    """Logits of a few values only, so that nearly all tie."""
    values = torch.randint(num_levels, (n, vocab_size), generator=torch.Generator().manual_seed(4))
    return values.float() * 0.5


@pytest.mark.parametrize("num_levels", [1, 3])
@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_k": 20}, {"top_p": 0.4}, {"min_p": 1.0}, {"top_k": 9, "top_p": 0.3}],
    ids=str,
)
def test_ties_are_kept_and_the_first_of_the_best_is_greedy(
    num_levels: int, filters: dict[str, float], device: torch.device
) -> None:
    n = ROWS // 2
    check(levels(n, 300, num_levels), inputs(n, **filters), device)


def test_ties_beyond_the_room_for_candidates(device: torch.device) -> None:
    """More tied and more kept tokens than a program holds in registers: the search goes over the row itself."""
    n, vocab_size = 2, 9000
    logits = levels(n, vocab_size, 3)
    check(logits, inputs(n, top_k=6000, seed=[3, 4]), device)
    check(logits, inputs(n, top_p=0.7), device)
    flat = random_logits(n, vocab_size, seed=5, spread=0.1)
    check(flat, inputs(n, top_p=0.8), device)
    check(flat, inputs(n, top_k=5000, top_p=0.9), device)


@pytest.mark.parametrize("capacity", [4, 64])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 3},
        {"top_k": 150},
        {"top_k": 399},
        {"top_p": 0.2},
        {"top_p": 0.95},
        {"top_p": 0.9999999},
        {"top_k": 150, "top_p": 0.6, "min_p": 0.9},
    ],
    ids=str,
)
def test_more_likely_tokens_than_there_is_room_for(
    filters: dict[str, float], capacity: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search reads the row again, between closer bounds; of equal logits none is between any."""
    monkeypatch.setattr(sampling, "_CANDIDATES", capacity)
    logits = random_logits(ROWS, 400, seed=3, spread=0.1)
    logits[1::2] = logits[1::2].sign() * 0.01  # two groups of ties
    check(logits, inputs(ROWS, **filters), device)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.75}, {1, 2, 3}),
        ({"min_p": 0.45}, {1, 2, 3}),
        ({"top_k": 2, "top_p": 0.55}, {1}),
    ],
    ids=str,
)
def test_filters_by_hand(filters: dict[str, float], kept: set[int], device: torch.device) -> None:
    """As the CPU's tests have them, so that both cannot be wrong in one way."""
    n = 1000 if ON_GPU else 5
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(n, -1).contiguous()
    drawn = set(check(logits, inputs(n, **filters), device).tolist())
    assert drawn == kept if ON_GPU else drawn <= kept


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9}], ids=["free", "filtered"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masked_tokens(filters: dict[str, float], temperature: float, device: torch.device) -> None:
    """Several of a row, in no order, one of them twice; what is masked would otherwise be drawn."""
    n = 50 if ON_GPU else 6
    logits = random_logits(n, 70, seed=6)
    best = logits.topk(2).indices.numpy()
    masked = np.array([(i, t) for i in range(0, n, 2) for t in best[i]] + [(4, best[4, 0]), (1, 69)])[::-1]
    columns = inputs(n, temperature=temperature, masked_rows=masked[:, 0], masked_ids=masked[:, 1], **filters)
    tokens = check(logits, columns, device, allowed=0)
    assert not any(int(tokens[row]) == token for row, token in masked.tolist())


def test_all_tokens_of_a_row_masked_but_one(device: torch.device) -> None:
    logits = random_logits(3, 40, seed=7)
    others = [t for t in range(40) if t != 23]
    for filters in ({}, {"top_k": 4, "top_p": 0.5, "min_p": 0.1}):
        columns = inputs(3, masked_rows=[1] * 39, masked_ids=others, **filters)
        assert check(logits, columns, device, allowed=0)[1] == 23


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_minus_infinity_is_never_drawn(filters: dict[str, float], temperature: float, device: torch.device) -> None:
    n = 20 if ON_GPU else 4
    logits = torch.full((n, 90), -math.inf)
    logits[0, 77] = -3.0  # one finite token
    logits[1, 5:8] = 2.0
    logits[2, ::7] = random_logits(1, 13)[0]
    logits[3:] = random_logits(n - 3, 90, seed=8).where(torch.arange(90) % 2 == 0, -math.inf)
    tokens = check(logits, inputs(n, temperature=temperature, **filters), device, allowed=0)
    assert tokens[0] == 77
    assert torch.isfinite(logits[torch.arange(n), tokens]).all()


@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.9, "min_p": 0.1}], ids=["free", "filtered"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_flagged(
    filters: dict[str, float], temperature: float, device: torch.device
) -> None:
    n = 7
    logits = random_logits(n, 150, seed=9)
    logits[1, 149] = math.nan
    logits[2, 0] = math.inf
    logits[3] = -math.inf
    logits[4] = math.nan
    logits[5, 3] = -math.inf  # this row is sound
    token_ids = check(logits, inputs(n, temperature=temperature, **filters), device, allowed=0)
    clean = on_device(logits[[0, 5, 6]], inputs(3, temperature=temperature, seed=[0, 5, 6], **filters), device)
    assert torch.equal(token_ids[[0, 5, 6]], clean[0])
    assert clean[1].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_widened(dtype: torch.dtype, device: torch.device) -> None:
    n = max(2, ROWS // 4)
    logits = random_logits(n, 400, seed=10).to(dtype)
    check(logits, inputs(n), device)
    check(logits, inputs(n, top_k=20, top_p=0.8), device)
    check(logits, inputs(n, temperature=0.0), device)


def test_rows_may_be_part_of_a_wider_tensor(device: torch.device) -> None:
    wide, columns = random_logits(4, 128, seed=11), inputs(4, top_k=[0, 5, 0, 9])
    token_ids, ok = sample_tokens(wide.to(device)[:, :100], DeviceSamplingInputs.from_host(columns, device))
    assert torch.equal(token_ids.cpu(), sample(wide[:, :100].contiguous(), columns).token_ids)
    assert ok.all()


def test_no_rows(device: torch.device) -> None:
    token_ids, ok = on_device(torch.empty(0, 50), inputs(0), device)
    assert (token_ids.shape, ok.shape) == ((0,), (0,))


def test_a_row_draws_the_same_alone_and_in_any_batch(device: torch.device) -> None:
    n = 8 if ON_GPU else 4
    logits = random_logits(n, 300, seed=12)
    columns = {"top_k": np.arange(n) % 3 * 20, "top_p": np.where(np.arange(n) % 2, 0.9, 1.0), "position": np.arange(n)}
    together = on_device(logits, inputs(n, **columns), device)[0]
    for i in range(n):
        mine = {k: v[i] for k, v in columns.items()}
        assert on_device(logits[i : i + 1], inputs(1, seed=i, **mine), device)[0] == together[i]


def test_inputs_that_are_filled_again(device: torch.device) -> None:
    """As for a CUDA graph: buffers for more rows and masked tokens than given; padding rows after the last are
    harmless."""
    room = DeviceSamplingInputs.allocate(ROW_PARAMETERS.dtype, 9, 20, device)
    room.buffer.fill_(0xFF)
    addresses = [getattr(room, name).data_ptr() for name in ("parameters", "position", "masked_token_ids")]
    logits = random_logits(9, 120, seed=13)
    for n, masked_tokens in ((5, {}), (9, {"masked_rows": [8, 0], "masked_ids": [3, 4]}), (2, {"top_p": 0.5}), (0, {})):
        columns = inputs(n, temperature=0.8, **masked_tokens)
        assert DeviceSamplingInputs.from_host(columns, device, out=room) is room
        assert [getattr(room, name).data_ptr() for name in ("parameters", "position", "masked_token_ids")] == addresses
        token_ids, ok = on_device(logits, columns, device, placed=room)
        assert torch.equal(token_ids[:n], sample(logits[:n], columns).token_ids)
        assert torch.equal(token_ids[n:], logits[n:].argmax(-1))
        assert ok.all()


def test_inputs_say_which_variant_they_need(device: torch.device) -> None:
    def place(**columns: Any) -> DeviceSamplingInputs:
        return DeviceSamplingInputs.from_host(inputs(3, **columns), device)

    masked = place(masked_rows=[2, 0, 2], masked_ids=[5, 6, 7])
    assert masked.masked_start.tolist() == [0, 1, 1]
    assert masked.masked_end.tolist() == [1, 1, 3]
    assert masked.masked_token_ids.tolist() == [6, 5, 7]
    views = (masked.parameters, masked.position, masked.masked_start, masked.masked_end, masked.masked_token_ids)
    assert all(view.data_ptr() % 16 == 0 for view in views)


# ---------------------------------------------------------------------------------------------------------------
# On a GPU only.


REAL = [32_000, 49_152, 128_256, 151_936, 262_144]
FILTERS = [
    {},
    {"temperature": 0.0},
    {"top_k": 50},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "min_p": 0.01},
]


@gpu_only
@pytest.mark.parametrize("vocab_size", REAL)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_vocabularies(
    vocab_size: int, filters: dict[str, float], dtype: torch.dtype, device: torch.device
) -> None:
    logits = random_logits(16, vocab_size, seed=vocab_size, spread=2.5).to(dtype)
    check(logits, inputs(16, position=np.arange(16) * 1000, **filters), device, allowed=1)


@gpu_only
def test_draws_have_the_exact_probabilities(device: torch.device) -> None:
    """60 tokens of weights 1 to 60 in many groups, 100,000 draws; top_k=20 and top_p=0.6 leave the best 12."""
    draws = 100_000
    weights = np.random.default_rng(0).permutation(np.arange(1, 61)).astype(np.float64)
    logits = torch.from_numpy(weights).log().float().expand(draws, -1).contiguous()
    for filters, kept in (({}, 60), ({"top_k": 20, "top_p": 0.6}, 12), ({"min_p": 0.5}, 31)):
        tokens, _ = on_device(logits, inputs(draws, **filters), device)
        exact = np.where(weights > 60 - kept, weights, 0)
        counts = np.bincount(tokens.numpy(), minlength=60)
        assert counts[exact == 0].sum() == 0
        expected = exact[exact > 0] / exact.sum() * draws
        degrees = kept - 1
        statistic = float(((counts[exact > 0] - expected) ** 2 / expected).sum())
        # Wilson and Hilferty: the cube root of chi-squared over its degrees is nearly normal.
        z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
        assert abs(z) < 4, (filters, statistic, degrees)


@gpu_only
def test_a_graph_can_hold_it(device: torch.device) -> None:
    """Captured once with everything on; replayed with other logits and parameters in the same memory."""
    n, vocab_size = 8, 50_257
    room = DeviceSamplingInputs.allocate(ROW_PARAMETERS.dtype, n, 64, device)
    workspace = SamplingWorkspace.allocate(n, vocab_size, device)
    logits = torch.zeros(n, vocab_size, device=device)
    token_ids = torch.empty(n, dtype=torch.int64, device=device)
    ok = torch.empty(n, dtype=torch.bool, device=device)
    DeviceSamplingInputs.from_host(inputs(n), device, out=room)
    sample_tokens(logits, room, token_ids=token_ids, ok=ok, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample_tokens(logits, room, token_ids=token_ids, ok=ok, workspace=workspace)
    for filters in ({}, {"temperature": 0.0}, {"top_k": 50}, {"top_p": 0.9, "masked_rows": [3], "masked_ids": [17]}):
        given, columns = random_logits(n, vocab_size, seed=len(filters)), inputs(n, **filters)
        logits.copy_(given)
        DeviceSamplingInputs.from_host(columns, device, out=room)
        graph.replay()
        assert torch.equal(token_ids.cpu(), sample(given, columns).token_ids)


@gpu_only
def test_log_probabilities_on_a_gpu(device: torch.device) -> None:
    """float32 sums of 30,000 terms in another order: parts in 10^6."""
    logits, token_ids = random_logits(6, 30_000, seed=15), torch.tensor([5, 17, 29_999, 0, 1, 2])
    asked = np.array([3, -1, 0, 20, 5, -1])
    expected = token_logprobs(logits, token_ids, asked)
    found = token_logprobs(logits.to(device), token_ids.to(device), asked)
    assert expected is not None
    assert found is not None
    assert [f is None for f in found] == [e is None for e in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            assert (one.token_ids, one.ranks) == (other.token_ids, other.ranks)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
