"""Logit adjustments by row: biases, penalties, custom logits processors, token bitmasks, applied before sampling.

They are applied in this order, which `SamplingParams` documents. Their state follows from the row's admission and its
tokens alone, so a request that resumes after a preemption continues unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError
from ringcore.grammars import Grammars, Matcher
from ringcore.kernels.launch.upload import upload, upload_packed
from ringcore.model_executor.logit_adjustments import LogitAdjustments
from ringcore.protocol.steps import NewRequest, RowError
from ringcore.worker.logits.row_processors import RowProcessors
from ringcore.worker.rows.output_dependent_masks import OutputDependentMasks
from ringcore.worker.rows.row_tables import ALL_BITS, BitmaskTable, CountTable, mask_tokens, token_bitmask

__all__ = ["NO_TOKEN_LEFT", "AdjustLogits", "AdjustmentOps", "CountTokens", "RowAdjustments"]

NO_TOKEN_LEFT = (
    "no token is left to sample: allowed_token_ids, bad_words, structured_outputs, min_tokens or a logits processor "
    "mask every one; loosen one of them"
)


class AdjustLogits(Protocol):
    """See `model_executor.logit_adjustments.adjust_logits`."""

    def __call__(
        self,
        logits: torch.Tensor,
        adjustments: LogitAdjustments,
        *,
        out: torch.Tensor | None = None,
        bias: bool = True,
        penalties: bool = True,
        masks: bool = True,
    ) -> torch.Tensor: ...


CountTokens = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class AdjustmentOps(NamedTuple):
    """The two operations, as kernels or as their torch reference."""

    adjust_logits: AdjustLogits
    count_tokens: CountTokens


class _DeviceInputs(NamedTuple):
    """The inputs on the device, valid while `version` is unchanged and the same rows sample."""

    version: int
    rows: np.ndarray
    inputs: LogitAdjustments


class RowAdjustments:
    """The adjustments of rows 0 to max_num_seqs - 1. A row without any costs nothing.

    `is_adjusted` rows have at least one of: token counts, biases, a bitmask, a processor, a failed admission.
    """

    def __init__(self, config: EngineConfig, device: torch.device, dtype: str, ops: AdjustmentOps) -> None:
        """dtype: the model's compute dtype. Raises `ConfigError` for a custom processor."""
        max_rows, vocab_size = config.scheduler.max_num_seqs, config.model.spec.vocab_size
        self.grammars: Grammars | None = None  # the worker's, for structured outputs
        self.is_adjusted = np.zeros(max_rows, dtype=bool)
        self.needs_token_ids = np.zeros(max_rows, dtype=bool)  # the host must know all its tokens before it samples
        self.is_host_adjusted = np.zeros(max_rows, dtype=bool)  # those, and rows with a processor of the user
        self._vocab_size, self._device, self._ops = vocab_size, device, ops
        self._penalties = np.zeros((3, max_rows), dtype=np.float32)  # repetition, frequency, presence
        self._biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # ids, ascending; values
        self._counts = CountTable(max_rows, vocab_size, device)
        self._bitmasks = BitmaskTable(max_rows, vocab_size, device)
        self._dependent_masks = OutputDependentMasks(self._bitmasks)
        self._processors = RowProcessors(config, device, dtype)
        self._failed: dict[int, str] = {}
        self._version = 0  # incremented when anything in `_DeviceInputs` changes
        self._device_inputs: _DeviceInputs | None = None

    # -----------------------------------------------------------------------------------------------------------
    # Admission and removal of rows.

    def admit(self, request: NewRequest) -> None:
        """What fails here becomes the row's error in its first step."""
        row, params = request.row, request.sampling_params
        participates, wants_tokens, error = self._processors.admit(request)
        has_penalties = params.repetition_penalty != 1 or bool(params.frequency_penalty or params.presence_penalty)
        is_masked = bool(params.allowed_token_ids or request.bad_words_token_ids or params.structured_outputs)
        if not (participates or error or has_penalties or is_masked or params.logit_bias):
            return
        self._version += 1
        self.is_adjusted[row] = True
        self.is_host_adjusted[row] = participates
        if has_penalties:
            self._penalties[:, row] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
            prompt, output = np.split(request.token_ids, [request.num_prompt_tokens])
            self._counts.admit(row, prompt, output)
        if params.logit_bias:
            pairs = sorted(params.logit_bias.items())
            ids, values = zip(*pairs, strict=True)
            self._biases[row] = np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32)
        if is_masked or wants_tokens:
            error = error or self._admit_masked(request, is_masked, wants_tokens)
        if error is not None:
            self._failed[row] = error

    def _admit_masked(self, request: NewRequest, is_masked: bool, wants_tokens: bool) -> str | None:
        """-> the error message of its grammar, or None."""
        row, params = request.row, request.sampling_params
        matcher: Matcher | None = None
        if params.structured_outputs is not None:
            try:
                assert self.grammars is not None, "structured outputs need a runner with grammars"
                matcher = self.grammars.matcher(params.structured_outputs)
            except InvalidRequestError as error:
                return error.message
        allowed = self._allowed(params.allowed_token_ids, request.bad_words_token_ids) if is_masked else None
        long_words = [word for word in request.bad_words_token_ids if len(word) > 1]
        if allowed is not None:
            self._bitmasks.admit(row, allowed)
        if matcher is not None or long_words or wants_tokens:
            self.needs_token_ids[row] = self.is_host_adjusted[row] = True
            changes = matcher is not None or bool(long_words)
            stops = request.stop_token_ids
            self._dependent_masks.admit(row, allowed if changes else None, long_words, matcher, stops)
        return None

    def _allowed(self, allowed_token_ids: Sequence[int] | None, bad_words: Sequence[Sequence[int]]) -> np.ndarray:
        """[num_words] int32: the part of the row's bitmask that does not depend on its output."""
        if allowed_token_ids:
            bitmask = token_bitmask(self._vocab_size, np.array(allowed_token_ids, dtype=np.int64))
        else:
            bitmask = np.full(-(-self._vocab_size // 32), ALL_BITS, dtype=np.int32)
        single = [word[0] for word in bad_words if len(word) == 1]
        if single:
            mask_tokens(bitmask, np.array(single, dtype=np.int64))
        return bitmask

    def clear(self, rows: np.ndarray) -> None:
        """Forgets rows [n]."""
        if not self.is_adjusted[rows].any():
            return
        self._version += 1
        for row in rows[self.is_adjusted[rows]].tolist():
            self._counts.release(row)
            self._bitmasks.release(row)
            self._dependent_masks.clear(row)
            self._processors.clear(row)
            self._biases.pop(row, None)
            self._failed.pop(row, None)
        for column in (self.is_adjusted, self.needs_token_ids, self.is_host_adjusted):
            column[rows] = False

    # -----------------------------------------------------------------------------------------------------------
    # A step.

    def report_failed(self, rows: np.ndarray, errors: dict[int, RowError]) -> None:
        """Adds to `errors` those of rows [n] whose admission or matcher failed."""
        if self._failed:
            _add_errors(errors, {row: self._failed[row] for row in rows.tolist() if row in self._failed})

    def adjust(
        self,
        logits: torch.Tensor,
        rows: np.ndarray,
        generated: Callable[[int], np.ndarray],
        errors: dict[int, RowError],
    ) -> torch.Tensor:
        """The model's logits [n, vocab_size] of any float dtype, of rows [n] -> adjusted logits [n, vocab_size] float32
        to sample from, in new memory. Does not wait for the device.

        generated: a row's generated tokens, [num_generated] int32, if it `needs_token_ids`. Adds to `errors`, by row.
        """
        dependent = rows[self.needs_token_ids[rows]].tolist()
        if dependent:
            failed = self._dependent_masks.update(dependent, generated, self.grammars)
            self._failed |= failed
            _add_errors(errors, failed)
        self._bitmasks.send()
        inputs, ops = self._inputs(rows), self._ops
        if not self._processors.participates(rows):
            return ops.adjust_logits(logits, inputs)
        adjusted = ops.adjust_logits(logits, inputs, masks=False)
        num_seen = self._dependent_masks.num_seen
        _add_errors(errors, self._processors.apply(adjusted, rows, lambda row: generated(row)[: num_seen(row)]))
        return ops.adjust_logits(adjusted, inputs, out=adjusted, bias=False, penalties=False)

    def count(self, rows: np.ndarray, token_ids: torch.Tensor) -> None:
        """Counts token_ids [n] int64, on the device, which rows [n] of the last `adjust` sampled."""
        if (self._counts.slot_of_row[rows] >= 0).any():
            inputs = self._inputs(rows)
            self._ops.count_tokens(inputs.counts, inputs.counts_slot, token_ids)

    def has_counts(self, rows: np.ndarray) -> np.ndarray:
        """[n] bool: of which of rows [n] tokens are counted."""
        counted: np.ndarray = self._counts.slot_of_row[rows] >= 0
        return counted

    def add_counts(self, rows: np.ndarray, token_ids: torch.Tensor, numbers: torch.Tensor) -> None:
        """Adds numbers [n] int32 to the counts of token_ids [n] int64, both on the device, of rows [n], each of which
        `has_counts` and may occur several times."""
        slots = upload(self._counts.slot_of_row[rows].astype(np.int64), self._device)
        places = slots * self._vocab_size + token_ids
        self._counts.tensor.view(-1).index_add_(0, places, numbers)

    def _inputs(self, rows: np.ndarray) -> LogitAdjustments:
        """The device inputs of rows [n]; copied to the device only where they changed."""
        current = self._device_inputs
        if current is None or current.version != self._version or not np.array_equal(current.rows, rows):
            current = self._device_inputs = _DeviceInputs(self._version, rows.copy(), self._send(rows))
        return current.inputs

    def _send(self, rows: np.ndarray) -> LogitAdjustments:
        """All columns in one H2D copy."""
        none = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        biases = [self._biases.get(row, none) for row in rows.tolist()]
        num_biases = np.array([len(ids) for ids, _ in biases], dtype=np.int32)
        ends = np.cumsum(num_biases, dtype=np.int32)
        repetition, frequency, presence = self._penalties[:, rows]
        columns = {
            "repetition_penalty": repetition,
            "frequency_penalty": frequency,
            "presence_penalty": presence,
            "counts_slot": self._counts.slot_of_row[rows],
            "bias_start": ends - num_biases,
            "bias_end": ends,
            "bias_ids": np.concatenate([ids for ids, _ in biases]),
            "bias_values": np.concatenate([values for _, values in biases]),
            "mask_slot": self._bitmasks.slot_of_row[rows],
        }
        on_device = dict(zip(columns, upload_packed(list(columns.values()), self._device), strict=True))
        return LogitAdjustments(**on_device, counts=self._counts.tensor, masks=self._bitmasks.tensor)


def _add_errors(errors: dict[int, RowError], failed: dict[int, str]) -> None:
    for row, message in failed.items():
        errors.setdefault(row, RowError(row, message))
