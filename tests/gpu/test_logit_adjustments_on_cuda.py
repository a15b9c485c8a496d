"""Adjusted logits and counted tokens on a GPU at the sizes of real models: those of the CPU bit by bit, and no wait.

The kernels are imported by the tests, not by this module: where there is no GPU, other tests want them interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import numpy as np
import pytest
import torch
from sampling_rows import inputs

from ringcore.model_executor import logit_adjustments as reference
from ringcore.model_executor.logit_adjustments import IN_PROMPT, LogitAdjustments, reset_counts

ROWS, VOCAB_SIZE = 256, 151_936
NUM_SLOTS = 64


def real_adjustments(vocab_size: int, seed: int = 0) -> LogitAdjustments:
    """Of ROWS rows on the CPU: a third each with penalties, with up to 1024 biases, with a mask; some with all."""
    rng = np.random.default_rng(seed)
    seen = rng.random((NUM_SLOTS, vocab_size)) < 0.02
    counts = seen * rng.integers(0, 4, seen.shape) + (rng.random(seen.shape) < 0.05) * IN_PROMPT
    masks = rng.integers(0, 2**32, (NUM_SLOTS, -(-vocab_size // 32)), np.uint32).view(np.int32)

    def slots() -> np.ndarray:
        return np.where(rng.random(ROWS) < 1 / 3, rng.integers(0, NUM_SLOTS, ROWS), -1)

    lengths = np.where(rng.random(ROWS) < 1 / 3, rng.integers(1, 1025, ROWS), 0)
    ids = [np.sort(rng.choice(vocab_size, length, replace=False)) for length in lengths]
    ids[0] = np.arange(1024)  # all in one tile
    ends = np.cumsum([len(one) for one in ids])
    columns = {
        "repetition_penalty": rng.uniform(0.5, 2, ROWS),
        "frequency_penalty": rng.uniform(-2, 2, ROWS),
        "presence_penalty": rng.uniform(-2, 2, ROWS),
        "counts_slot": slots(),
        "bias_start": np.concatenate(([0], ends[:-1])),
        "bias_end": ends,
        "bias_ids": np.concatenate(ids),
        "bias_values": rng.uniform(-100, 100, ends[-1]),
        "mask_slot": slots(),
        "counts": counts,
        "masks": masks,
    }
    floats = ("repetition_penalty", "frequency_penalty", "presence_penalty", "bias_values")
    return LogitAdjustments(
        **{
            name: torch.from_numpy(column.astype(np.float32 if name in floats else np.int32))
            for name, column in columns.items()
        }
    )


def on(device: torch.device, adjustments: LogitAdjustments) -> LogitAdjustments:
    return LogitAdjustments(**{one.name: getattr(adjustments, one.name).to(device) for one in fields(adjustments)})


def real_logits(vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, vocab_size, generator=generator) * 4).to(dtype)


@contextmanager
def nothing_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_those_of_the_cpu(cuda: torch.device, vocab_size: int, dtype: torch.dtype) -> None:
    from ringcore.kernels.logits.logit_adjustments import adjust_logits

    logits, adjustments = real_logits(vocab_size, dtype), real_adjustments(vocab_size)
    expected = reference.adjust_logits(logits, adjustments)
    found = adjust_logits(logits.to(cuda), on(cuda, adjustments))
    assert torch.equal(found.cpu(), expected)
    if dtype == torch.float32:
        given = logits.to(cuda)
        assert adjust_logits(given, on(cuda, adjustments), out=given) is given
        assert torch.equal(given.cpu(), expected)


@pytest.mark.parametrize("part", ["bias", "penalties", "masks"])
def test_each_part_alone(cuda: torch.device, part: str) -> None:
    from ringcore.kernels.logits.logit_adjustments import adjust_logits

    parts = {name: name == part for name in ("bias", "penalties", "masks")}
    logits, adjustments = real_logits(VOCAB_SIZE), real_adjustments(VOCAB_SIZE, seed=1)
    found = adjust_logits(logits.to(cuda), on(cuda, adjustments), **parts)
    assert torch.equal(found.cpu(), reference.adjust_logits(logits, adjustments, **parts))


def test_counts_are_those_of_the_cpu(cuda: torch.device) -> None:
    """A prompt of 100,000 tokens, and then some steps."""
    from ringcore.kernels.logits.logit_adjustments import count_tokens

    rng = np.random.default_rng(2)
    prompt, output = (rng.integers(0, VOCAB_SIZE, size).astype(np.int32) for size in (100_000, 5000))
    slots = torch.from_numpy(np.where(np.arange(ROWS) % 5 == 0, -1, rng.permutation(ROWS)).astype(np.int32))
    counts = [torch.full((ROWS, VOCAB_SIZE), 7, dtype=torch.int32, device=device) for device in ("cpu", cuda)]
    for one in counts:
        reset_counts(one, int(slots[1]), prompt, output)
    for step in range(5):
        tokens = torch.from_numpy(rng.integers(0, 3 + step, ROWS))
        reference.count_tokens(counts[0], slots, tokens)
        count_tokens(counts[1], slots.to(cuda), tokens.to(cuda))
    assert torch.equal(counts[1].cpu(), counts[0])


def test_nothing_waits_for_the_device(cuda: torch.device) -> None:
    from ringcore.kernels.logits.logit_adjustments import adjust_logits, count_tokens

    logits, adjustments = real_logits(VOCAB_SIZE).to(cuda), on(cuda, real_adjustments(VOCAB_SIZE))
    slots, tokens = torch.arange(NUM_SLOTS, dtype=torch.int32, device=cuda), torch.arange(NUM_SLOTS, device=cuda)
    prompt, output = np.arange(5000, dtype=np.int32), np.arange(100, dtype=np.int32)

    def everything() -> None:
        reset_counts(adjustments.counts, 3, prompt, output)
        adjusted = adjust_logits(logits, adjustments, masks=False)
        adjust_logits(adjusted, adjustments, out=adjusted, bias=False, penalties=False)
        count_tokens(adjustments.counts, slots, tokens)

    everything()  # compiles the kernels, and sets up what the libraries set up lazily
    with nothing_waits():
        everything()


def test_a_graph_can_hold_it(cuda: torch.device) -> None:
    """Captured once; replayed with other numbers, tables and logits in the same memory."""
    from ringcore.kernels.logits.logit_adjustments import adjust_logits, count_tokens

    given, tokens = on(cuda, real_adjustments(50_257)), torch.zeros(ROWS, dtype=torch.int64, device=cuda)
    logits, out = real_logits(50_257).to(cuda), torch.empty(ROWS, 50_257, device=cuda)
    slots = torch.full((ROWS,), -1, dtype=torch.int32, device=cuda)

    def run() -> None:
        adjust_logits(logits, given, out=out)
        count_tokens(given.counts, slots, tokens)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in (3, 4):
        adjustments = real_adjustments(50_257, seed)
        for one in fields(adjustments):
            new, old = getattr(adjustments, one.name), getattr(given, one.name)
            if new.shape != old.shape:  # biases: as many as there is room for
                size = min(len(new), len(old))
                adjustments.bias_end.clamp_(max=size), adjustments.bias_start.clamp_(max=size)
                new, old = new[:size], old[:size]
            old.copy_(new)
        given.bias_start.copy_(adjustments.bias_start), given.bias_end.copy_(adjustments.bias_end)
        logits.copy_(real_logits(50_257, seed=seed))
        slots[:NUM_SLOTS].copy_(torch.arange(NUM_SLOTS, dtype=torch.int32).flip(0))
        tokens.copy_(torch.arange(ROWS) % 100)
        graph.replay()
        assert torch.equal(out.cpu(), reference.adjust_logits(logits.cpu(), adjustments))
        reference.count_tokens(adjustments.counts, slots.cpu(), tokens.cpu())
        assert torch.equal(given.counts.cpu(), adjustments.counts)


def test_what_is_drawn_is_what_the_cpu_draws(cuda: torch.device) -> None:
    """Rows that are adjusted and those that are not; two tokens as close as the rounding of exp in one of them, at
    most."""
    from ringcore.kernels.logits.logit_adjustments import adjust_logits
    from ringcore.kernels.logits.sampling import DeviceSamplingInputs, sample_tokens
    from ringcore.model_executor.sampler import sample

    logits, adjustments = real_logits(VOCAB_SIZE), real_adjustments(VOCAB_SIZE, seed=5)
    kinds = np.arange(ROWS) % 4
    columns = inputs(
        ROWS,
        temperature=np.choose(kinds, [0, 1, 0.7, 1.5]),
        top_k=np.choose(kinds, [0, 0, 50, 0]),
        top_p=np.choose(kinds, [1, 1, 0.9, 0.95]),
        min_p=np.choose(kinds, [0, 0, 0, 0.01]),
        position=9,
    )
    expected = sample(reference.adjust_logits(logits, adjustments), columns)
    adjusted = adjust_logits(logits.to(cuda), on(cuda, adjustments))
    token_ids, ok = sample_tokens(adjusted, DeviceSamplingInputs.from_host(columns, cuda))
    assert ok.all()
    assert expected.ok.all()
    assert (token_ids.cpu() != expected.token_ids).sum() <= 1
