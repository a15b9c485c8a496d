"""Sampling: from a row of logits to a token by token masks, temperature, filters and one draw, with per-row parameters.

The draw is Gumbel-max with a counter-based RNG whose numbers depend on a row's seed and the position of its token
alone, so a seeded row draws the same token alone, in any batch, after a preemption, and on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from ringcore.kernels.launch.upload import upload
from ringcore.protocol.requests import TokenLogprobs

__all__ = [
    "HostLogprobsCopy",
    "LogprobTensors",
    "PendingLogprobs",
    "Sampled",
    "SamplingInputs",
    "launch_logprobs",
    "logprob_tensors",
    "philox_4x32_10",
    "sample",
    "token_logprobs",
    "uniforms",
]

_FEW_LOGPROBS = 64  # largest num_logprobs of rows whose top-k is computed in one batch
# Length of the sorted head of a top_p row; a row whose head does not reach top_p falls back to bisection.
_SORTED_HEAD = 256


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Sampling parameters of n rows and what else their draw depends on."""

    parameters: np.ndarray  # [n] records of `protocol.row_parameters`, contiguous: parameters["top_k"] is a column
    position: np.ndarray  # [n] int64: of the sampled token in its sequence
    masked_rows: np.ndarray  # [m] int64: row masked_rows[i] may not sample masked_ids[i]
    masked_ids: np.ndarray  # [m] int64


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of a row that is not `ok` is a valid id without meaning."""

    token_ids: torch.Tensor  # [n] int64
    ok: np.ndarray  # [n] bool: the row's logits have a finite maximum and no NaN


def sample(logits: torch.Tensor, inputs: SamplingInputs) -> Sampled:
    """Samples one token per row. logits: [n, vocab_size] float32, on the CPU, not modified.

    The GPU kernel is `kernels.sampling.sample_tokens`, which samples the same tokens.
    """
    if len(inputs.masked_rows):
        masked = torch.from_numpy(inputs.masked_rows), torch.from_numpy(inputs.masked_ids)
        logits = logits.index_put(masked, logits.new_tensor(-torch.inf))
    rows = logits.numpy()
    best = rows.argmax(axis=-1)  # a tenth of torch's time; NaN is the largest in both
    token_ids, ok = torch.from_numpy(best), np.isfinite(rows[np.arange(len(rows)), best])
    drawn = ((inputs.parameters["temperature"] > 0) & ok).nonzero()[0]
    if len(drawn):
        places = torch.from_numpy(drawn)
        whole = len(drawn) == len(logits)
        parameters = inputs.parameters.take(drawn)
        scaled = (logits if whole else logits[places]) / torch.from_numpy(parameters["temperature"])[:, None]
        weights = _weights(scaled, parameters["top_k"], parameters["top_p"], parameters["min_p"])
        token_ids[places] = _draw(weights, parameters["seed"], inputs.position[drawn])
    return Sampled(token_ids, ok)


# ---------------------------------------------------------------------------------------------------------------
# Filters. A row's weights are its probabilities up to a factor, the best token's weight being 1. Each filter keeps the
# tokens at or above a threshold on them, so their conjunction is the highest threshold. Tokens that tie with the last
# one kept are kept too: which of them came first is an accident of sorting.


def _weights(scaled: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> torch.Tensor:
    """[n, vocab_size] float32 of scaled logits of the same shape; 0 for filtered tokens."""
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp_()
    top_k = np.where(top_k >= weights.shape[1], 0, top_k)
    ranked = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(ranked) and not min_p.any():
        return weights
    threshold = torch.from_numpy(min_p)[:, None].clone()
    if len(ranked):
        rows = torch.from_numpy(ranked)
        found = _ranked_thresholds(weights[rows], top_k[ranked], top_p[ranked])
        threshold[rows] = torch.maximum(threshold[rows], found)
    return weights.masked_fill_(weights < threshold, 0)


def _ranked_thresholds(weights: torch.Tensor, top_k: np.ndarray, top_p: np.ndarray) -> torch.Tensor:
    """[n, 1]: the smallest weight kept by top_k (0 keeps all), then by top_p of what top_k left."""
    head = max(int(top_k.max()), _SORTED_HEAD if (top_k == 0).any() else 1)
    best = weights.topk(min(head, weights.shape[1])).values  # sorted
    limit = torch.from_numpy(top_k)[:, None]
    within = (torch.arange(best.shape[1]) < limit) | (limit == 0)
    mass = torch.where(within, best, 0).double().cumsum(-1)
    p = torch.from_numpy(top_p.astype(np.float64))[:, None]
    target = p * torch.where(limit == 0, weights.sum(-1, keepdim=True).double(), mass[:, -1:])
    # A token is kept if those before it have not reached the target: so is the one that reaches it, and the best.
    keep = within & ((mass - best < target) | (p >= 1))
    threshold = best.gather(1, keep.sum(-1, keepdim=True) - 1)
    short = ((limit == 0) & (mass[:, -1:] < target))[:, 0].nonzero()[:, 0]
    if len(short):
        threshold[short] = _mass_threshold(weights[short], target[short])
    return threshold


def _mass_threshold(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[n, 1]: the largest weight such that those at or above it add up to `target` [n, 1].

    By bisection over the bits of a float, whose order for positive floats is that of the floats: 30 sums in place of a
    sort, 13 ms for a row of a vocabulary of 49152.
    """
    low = torch.zeros(target.shape, dtype=torch.int32)  # all of them reach it
    high = torch.ones(target.shape).view(torch.int32) + 1  # none of them does
    while (high - low).max() > 1:
        middle = low + (high - low) // 2
        mass = torch.where(weights >= middle.view(torch.float32), weights, 0).sum(-1, keepdim=True)
        enough = mass >= target
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return low.view(torch.float32)


# ---------------------------------------------------------------------------------------------------------------
# The draw.


def _draw(weights: torch.Tensor, seed: np.ndarray, position: np.ndarray) -> torch.Tensor:
    """[n] int64: one token per row, with the probabilities weights [n, vocab_size] / their sum.

    Gumbel-max in two levels: first among groups of neighbouring tokens by the groups' sums, then among the tokens of
    the winning group. That is exact, since a group wins with the probability of its sum and the numbers of the two
    levels are independent; and it needs about 2 * sqrt(vocab_size) random numbers per row in place of vocab_size: 448
    for a vocabulary of 49152, where one number per token would take longer than the model's step.

    argmax(log w + gumbel) is computed as argmax(w / e), e = -log(u) being exponential: the same order, half the
    logarithms, and a weight of 0 never wins.
    """
    vocab_size = weights.shape[1]
    group = 1 << ((vocab_size.bit_length() + 1) // 2)
    if vocab_size % group:
        weights = functional.pad(weights, (0, group - vocab_size % group))
    grouped = weights.view(len(weights), -1, group)
    num_groups = grouped.shape[1]
    race = uniforms(seed, position, num_groups + group).log_().neg_()
    winner = (grouped.sum(dim=-1) / race[:, :num_groups]).argmax(dim=-1)
    members = grouped[torch.arange(len(weights)), winner]  # [n, group]
    return winner * group + (members / race[:, num_groups:]).argmax(dim=-1)


def uniforms(seed: np.ndarray, position: np.ndarray, count: int) -> torch.Tensor:
    """[n, count] float64 in (0, 1): row i's numbers depend on seed[i], position[i] and the column alone.

    Philox with the seed as its key and (column // 4, position) as its counter; column % 4 is the word of its output.
    """
    seeds, positions = torch.from_numpy(seed)[:, None], torch.from_numpy(position)[:, None]
    columns = torch.arange(-(-count // 4)).expand(len(seed), -1)
    counter = (columns, (positions & _WORD).expand_as(columns), (positions >> 32).expand_as(columns), columns * 0)
    words = torch.stack(philox_4x32_10(counter, (seeds & _WORD, (seeds >> 32) & _WORD)), dim=-1)
    # 2^-33 away from 0 and 1 at least, so that the logarithm is finite and not 0.
    return words.view(len(seed), -1)[:, :count].double().add_(0.5).mul_(2.0**-32)


_WORD = 0xFFFF_FFFF
_MULTIPLIERS = (0xD251_1F53, 0xCD9E_8D57)
_KEY_STEPS = (0x9E37_79B9, 0xBB67_AE85)

_Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox_4x32_10(counter: _Words4, key: tuple[torch.Tensor, torch.Tensor]) -> _Words4:
    """The counter-based generator Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
    1, 2, 3", SC 2011). Every word is an int64 tensor of values in [0, 2^32); the shapes broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _multiply(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and low 32 bits of word * multiplier, both below 2^32 (the multiplier above 2^31).

    Their product does not fit a signed 64-bit number; with multiplier - 2^32 it does, has the same low bits, and its
    high ones are too small by exactly `word`.
    """
    product = word * (multiplier - (1 << 32))
    return (product >> 32) + word, product & _WORD


# ---------------------------------------------------------------------------------------------------------------
# Log-probabilities.


class LogprobTensors(NamedTuple):
    """Of n rows, the sampled token first and then the most likely ones, on the logits' device."""

    token_ids: torch.Tensor  # [n, 1 + count] int64
    logprobs: torch.Tensor  # [n, 1 + count] float32
    ranks: torch.Tensor  # [n, 1 + count] int64


def logprob_tensors(logits: torch.Tensor, token_ids: torch.Tensor, count: int, by_row: bool = False) -> LogprobTensors:
    """Natural-log probabilities under the raw logits [n, vocab_size]: of token_ids [n] and the `count` most likely.

    A rank is 1 + the number of tokens with a larger logit. by_row: the sums of a row do not depend on the number of
    rows. Does not synchronise with the device.
    """
    logits, sampled = logits.float(), token_ids[:, None]
    rows = torch.split(logits, 1) if by_row else ()
    normalizer = torch.cat([row.logsumexp(-1, True) for row in rows]) if rows else logits.logsumexp(-1, True)
    top = logits.topk(min(count, logits.shape[1]))
    values = torch.cat((logits.gather(1, sampled), top.values), dim=1)
    ranks = torch.cat(
        (
            (logits > values[:, :1]).sum(dim=-1, keepdim=True) + 1,
            torch.searchsorted(-top.values, -top.values) + 1,  # the number of larger ones, ties not counted
        ),
        dim=1,
    )
    return LogprobTensors(torch.cat((sampled, top.indices), dim=1), values - normalizer, ranks)


class HostLogprobsCopy:
    """An asynchronous D2H copy of `LogprobTensors`."""

    def __init__(self, tensors: LogprobTensors) -> None:
        self._on_host = [_to_host(tensor) for tensor in tensors]
        self._copied: torch.cuda.Event | None = None
        if tensors.logprobs.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token ids, log-probabilities and ranks, [n, 1 + count] each. Waits for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        ids, logprobs, ranks = (tensor.numpy() for tensor in self._on_host)
        return ids, logprobs, ranks


class PendingLogprobs:
    """`logprob_tensors` of the rows with num_logprobs, being copied to the host."""

    def __init__(self, copies: Sequence[tuple[np.ndarray, HostLogprobsCopy]], num_logprobs: np.ndarray) -> None:
        """copies: each with the rows [n] that it is of."""
        self._copies, self._num_logprobs = copies, num_logprobs

    def result(self) -> list[TokenLogprobs | None]:
        """Of every row, None for one without num_logprobs. Waits for the device."""
        found: list[TokenLogprobs | None] = [None] * len(self._num_logprobs)
        for rows, copy in self._copies:
            ids, logprobs, ranks = (array.tolist() for array in copy.arrays())
            for i, row in enumerate(rows.tolist()):
                n = 1 + int(self._num_logprobs[row])
                found[row] = TokenLogprobs(token_ids=ids[i][:n], logprobs=logprobs[i][:n], ranks=ranks[i][:n])
        return found


def launch_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: np.ndarray, by_row: bool = False
) -> PendingLogprobs | None:
    """`logprob_tensors` of the rows with num_logprobs[i] >= 0, row i for that many tokens; asynchronous.

    None if there is no such row. Rows with large num_logprobs are computed one by one, so that they do not widen the
    top-k of the others; by_row: all are.
    """
    rows_with_logprobs = np.flatnonzero(num_logprobs >= 0)
    if not len(rows_with_logprobs):
        return None
    counts = num_logprobs[rows_with_logprobs]
    most = -1 if by_row else _FEW_LOGPROBS
    few, many = rows_with_logprobs[counts <= most], rows_with_logprobs[counts > most]
    groups = [*([few] if len(few) else []), *many[:, None]]
    return PendingLogprobs(
        [(group, _copy_logprobs(logits, token_ids, group, num_logprobs)) for group in groups], num_logprobs
    )


def _copy_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, rows_with_logprobs: np.ndarray, num_logprobs: np.ndarray
) -> HostLogprobsCopy:
    rows = upload(rows_with_logprobs, logits.device)
    return HostLogprobsCopy(logprob_tensors(logits[rows], token_ids[rows], int(num_logprobs[rows_with_logprobs].max())))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: np.ndarray
) -> list[TokenLogprobs | None] | None:
    """`launch_logprobs`, then its result."""
    launched = launch_logprobs(logits, token_ids, num_logprobs)
    return None if launched is None else launched.result()
