"""The cost model of a step: its duration as a linear function of its tokens, requests and context length."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import msgspec
import numpy as np

from ringcore.checkpoint import ModelSpec
from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.kv_cache.spec import DTYPE_BYTES, FullAttentionSpec
from ringcore.testing.hardware import Hardware, ModelSize, find_hardware
from ringcore.testing.jsonl import read_jsonl

__all__ = ["StepCost", "StepWork", "read_measurements"]


class _Measurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    num_tokens: float
    num_seqs: float
    num_context_tokens: float
    seconds: float


def read_measurements(file: str | os.PathLike[str]) -> list[tuple[float, float, float, float]]:
    """The rows for `StepCost.fit`, from a JSONL file:

        {"num_tokens": 8, "num_seqs": 8, "num_context_tokens": 4096, "seconds": 0.0052}

    Raises `InvalidRequestError` naming file, line and field.
    """
    lines = read_jsonl(file, _Measurement, "measurements")
    return [(m.num_tokens, m.num_seqs, m.num_context_tokens, m.seconds) for _, m in lines]


class StepWork(NamedTuple):
    """The work of one step: the tokens it computes, the number of requests, and their total context length, whose keys
    and values it reads."""

    num_tokens: int
    num_seqs: int
    num_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """seconds = base_s + per_token_s * max(num_tokens - num_hidden_tokens, 0) + per_seq_s * num_seqs
                 + per_context_token_s * num_context_tokens

    `num_hidden_tokens`: the tokens whose computation is hidden by reading the weights (memory-bound steps).
    """

    base_s: float = 0.0
    per_token_s: float = 0.0
    per_seq_s: float = 0.0
    per_context_token_s: float = 0.0
    num_hidden_tokens: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(
                    f"step cost: {field.name}={value!r}: give a finite number, 0 or more",
                    option=field.name,
                    value=repr(value),
                )

    def seconds(self, work: StepWork) -> float:
        """The duration of one step."""
        return (
            self.base_s
            + self.per_token_s * max(work.num_tokens - self.num_hidden_tokens, 0.0)
            + self.per_seq_s * work.num_seqs
            + self.per_context_token_s * work.num_context_tokens
        )

    def run_seconds(self, work: StepWork, num_steps: int) -> float:
        """The duration of `num_steps` decode steps; `work` is the first, and sequences grow by one token a step."""
        growth = self.per_context_token_s * work.num_seqs
        return num_steps * self.seconds(work) + growth * (num_steps * (num_steps - 1) / 2)

    def steps_begun(self, work: StepWork, seconds: float, max_steps: int) -> int:
        """How many steps of such a run begin before `seconds` (> 0) have passed; 1 to `max_steps`."""
        a, b = self.per_context_token_s * work.num_seqs / 2, self.seconds(work)
        b -= a  # a run of j steps takes a j^2 + b j
        if (a * (max_steps - 1) + b) * (max_steps - 1) < seconds:
            return max_steps
        j = (math.sqrt(b * b + 4 * a * seconds) - b) / (2 * a) if a * seconds > 1e-9 * b * b else seconds / b
        steps = max(int(j), 0)
        while self.run_seconds(work, steps) < seconds:  # corrects rounding, and counts the step in progress
            steps += 1
        while steps > 1 and self.run_seconds(work, steps - 1) >= seconds:
            steps -= 1
        return max(steps, 1)

    @classmethod
    def fit(cls, measurements: Iterable[tuple[float, float, float, float]]) -> StepCost:
        """Fits rows of (num_tokens, num_seqs, num_context_tokens, seconds) by non-negative least squares.

        Minimizes squared relative errors, so that short steps weigh as much as long ones. Raises `InvalidRequestError`
        for an invalid row, and for fewer than four rows.
        """
        rows = [_checked(index, row) for index, row in enumerate(measurements)]
        if len(rows) < 4:
            raise InvalidRequestError(
                f"measurements: {len(rows)} rows; four coefficients need at least 4",
                field="measurements",
                value=len(rows),
            )
        table = np.array(rows)
        seconds = table[:, 3]
        inputs = np.column_stack([np.ones(len(table)), table[:, :3]]) / seconds[:, None]
        return cls(**dict(zip(_FITTED, _non_negative_least_squares(inputs), strict=True)))

    @classmethod
    def from_model(
        cls,
        spec: ModelSpec,
        hardware: str | Hardware,
        *,
        dtype: str | None = None,
        tensor_parallel_size: int = 1,
        kv_cache_dtype: str = "auto",
    ) -> StepCost:
        """A roofline model: the bytes and FLOPs of a step over the device's rates.

        The weights are read once a step, overlapped with the computation of the first tokens; every further token costs
        its FLOPs, every context token the bytes of its keys and values, every request the FLOPs of the LM head and its
        logits. Tensor parallelism divides all of it and adds two all-reduces a layer. Not modelled: the FLOPs of
        attention itself, which matter for prompts of many thousand tokens, and any overlap other than with the weights.
        Of a mixture of experts a step is taken to read all of them, which few tokens do not.

        hardware: a name of `HARDWARE`, or a `Hardware`. Raises `ConfigError` for an unknown name.
        """
        device = find_hardware(hardware) if isinstance(hardware, str) else hardware
        dtype = dtype or spec.dtype
        read = device.read_bytes_per_s * device.read_efficiency
        compute = device.flops_per_s * device.flops_efficiency * (2 / DTYPE_BYTES[dtype])
        ranks = tensor_parallel_size
        size = ModelSize.of(spec, dtype, ranks)
        weights_s = (size.layer_params + size.head_params) * size.dtype_bytes / read
        token_s = 2 * size.active_params / compute
        overhead_s = device.step_s
        if ranks > 1:
            num_reduces = 2 * spec.num_layers
            overhead_s += num_reduces * device.all_reduce_s
            token_link_s = num_reduces * 2 * spec.hidden_size * size.dtype_bytes / device.link_bytes_per_s
        else:
            token_link_s = 0.0
        return cls(
            base_s=overhead_s + weights_s,
            per_token_s=token_s + token_link_s,
            per_seq_s=2 * size.head_params / compute + 8 * spec.vocab_size * 4 / ranks / read,
            per_context_token_s=_context_token_bytes(spec, dtype, ranks, kv_cache_dtype != "auto") / read,
            num_hidden_tokens=weights_s / token_s,
        )


_FITTED = ("base_s", "per_token_s", "per_seq_s", "per_context_token_s")


def _context_token_bytes(spec: ModelSpec, dtype: str, ranks: int, is_fp8: bool) -> float:
    """The KV bytes of one token in the full-attention layers; those of sliding windows are negligible."""
    num_layers = spec.num_layers - len(spec.sliding_windows)
    of_a_head = FullAttentionSpec(1, 1, spec.head_dim, dtype, is_fp8=is_fp8).page_size_bytes
    return num_layers * max(1, spec.num_kv_heads / ranks) * of_a_head


def _checked(index: int, row: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    numbers = tuple(float(value) for value in row)
    if len(numbers) != 4 or not all(0 <= value < math.inf for value in numbers) or numbers[3] == 0:
        raise InvalidRequestError(
            f"measurements: row {index} is {row!r}; give num_tokens, num_seqs, num_context_tokens and seconds, the "
            "seconds above 0",
            field="measurements",
            value=index,
        )
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _non_negative_least_squares(inputs: np.ndarray) -> list[float]:
    """The x >= 0 that minimizes |inputs [num_rows, 4] @ x - 1|.

    Enumerates the active sets: the best x has some coefficients at 0 and solves the unconstrained problem in the
    others; four coefficients have 16 subsets.
    """
    scale = np.linalg.norm(inputs, axis=0)
    scale[scale == 0] = 1.0
    scaled, ones = inputs / scale, np.ones(len(inputs))
    best, best_error = np.zeros(inputs.shape[1]), float(len(inputs))
    for used in itertools.product([False, True], repeat=inputs.shape[1]):
        columns = np.flatnonzero(used)
        if not len(columns):
            continue
        solved, *_ = np.linalg.lstsq(scaled[:, columns], ones, rcond=None)
        error = float(np.square(scaled[:, columns] @ solved - ones).sum())
        if (solved >= 0).all() and error < best_error * (1 - 1e-9):
            best, best_error = np.zeros(inputs.shape[1]), error
            best[columns] = solved
    return [float(value) for value in best / scale]
