"""The user's logits processors in one worker: which rows participate in which, and the containment of their errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.kernels.launch.upload import upload
from ringcore.params.logits_processor import LogitsProcessor, LogitsProcessorContext, load_logits_processor
from ringcore.protocol.steps import NewRequest

__all__ = ["RowProcessors"]


class RowProcessors:
    """Applied in the order of the engine option `logits_processors`."""

    def __init__(self, config: EngineConfig, device: torch.device, dtype: str) -> None:
        """Raises `ConfigError` for one that cannot be loaded, or whose constructor raises."""
        spec, max_num_seqs = config.model.spec, config.scheduler.max_num_seqs
        context = LogitsProcessorContext(spec.vocab_size, max_num_seqs, device, dtype, tuple(spec.eos_token_ids))
        self._processors = [_create(name, context) for name in config.model.logits_processors]
        self._participates = np.zeros((len(self._processors), max_num_seqs), dtype=bool)
        self._broken: dict[int, str] = {}  # by processor: why it is disabled

    def admit(self, request: NewRequest) -> tuple[bool, bool, str | None]:
        """-> whether the row participates in any, whether one of these needs its token ids, and an error message."""
        if not self._processors:
            return False, False, None
        row, prompt = request.row, request.token_ids[: request.num_prompt_tokens]
        for index, processor in enumerate(self._processors):
            try:
                is_in = bool(processor.admit(row, request.sampling_params, prompt.copy()))
            except Exception as error:  # user code: only this request fails
                return False, False, _error_message(processor, "admit", error)
            if is_in and index in self._broken:
                return False, False, self._broken[index]
            self._participates[index, row] = is_in
        active = np.flatnonzero(self._participates[:, row])
        return len(active) > 0, any(self._processors[index].needs_token_ids for index in active), None

    def clear(self, row: int) -> None:
        for index in np.flatnonzero(self._participates[:, row]).tolist():
            self._participates[index, row] = False
            try:
                self._processors[index].remove(row)
            except Exception as error:  # user code; its per-row state may be wrong from now on: it is disabled
                self._broken[index] = _error_message(self._processors[index], "remove", error)

    def participates(self, rows: np.ndarray) -> bool:
        """Whether any of rows [n] participates in any processor."""
        return bool(self._processors) and bool(self._participates[:, rows].any())

    def apply(self, logits: torch.Tensor, rows: np.ndarray, generated: Callable[[int], np.ndarray]) -> dict[int, str]:
        """Applies the processors in place to logits [n, vocab_size] float32 of rows [n]; -> error messages by row.

        generated: a row's generated tokens, [num_generated] int32; called only for processors that need them.
        """
        failed: dict[int, str] = {}
        for processor, is_member in zip(self._processors, self._participates[:, rows], strict=True):
            places = np.flatnonzero(is_member)
            if not len(places):
                continue
            members = rows[places].copy()
            token_ids = [generated(row).copy() for row in members.tolist()] if processor.needs_token_ids else None
            try:
                _apply_to(processor, logits, places, members, token_ids)
            except Exception as error:  # user code: only its rows fail
                message = _error_message(processor, "apply", error)
                failed |= {row: message for row in rows[places].tolist() if row not in failed}
        return failed


def _apply_to(
    processor: LogitsProcessor,
    logits: torch.Tensor,
    places: np.ndarray,
    rows: np.ndarray,
    token_ids: Sequence[np.ndarray] | None,
) -> None:
    if len(places) == len(logits):
        processor.apply(logits, rows, token_ids)
        return
    index = upload(places, logits.device)
    taken = logits[index]
    processor.apply(taken, rows, token_ids)
    logits.index_copy_(0, index, taken)


def _create(name: str, context: LogitsProcessorContext) -> LogitsProcessor:
    try:
        return load_logits_processor(name)(context)
    except ConfigError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"logits_processors={name!r}: making it raised {type(error).__name__}: {error}",
            option="logits_processors",
            value=name,
        ) from error


def _error_message(processor: LogitsProcessor, method: str, error: Exception) -> str:
    return f"the logits processor {type(processor).__qualname__} raised in {method}: {type(error).__name__}: {error}"
