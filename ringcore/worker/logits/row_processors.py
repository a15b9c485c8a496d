"""The user's logits processors in one worker: which rows take part in which, and what happens where one raises."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError
from ringcore.params.logits_processor import LogitsProcessor, LogitsProcessorContext, load_logits_processor
from ringcore.protocol.steps import NewRequest

__all__ = ["RowProcessors"]


class RowProcessors:
    """In the order in which the engine was given them."""

    def __init__(self, config: EngineConfig, device: torch.device, dtype: str) -> None:
        """Raises `ConfigError` for one that cannot be loaded, or raises when it is made."""
        spec, max_num_seqs = config.model.spec, config.scheduler.max_num_seqs
        context = LogitsProcessorContext(spec.vocab_size, max_num_seqs, device, dtype, tuple(spec.eos_token_ids))
        self._processors = [_made(name, context) for name in config.model.logits_processors]
        self._takes_part = np.zeros((len(self._processors), max_num_seqs), dtype=bool)
        self._broken: dict[int, str] = {}  # by processor: why it takes no more rows

    def admit(self, request: NewRequest) -> tuple[bool, bool, str | None]:
        """-> whether the row takes part in any, whether one of these needs its tokens, and what went wrong."""
        if not self._processors:
            return False, False, None
        row, prompt = request.row, request.token_ids[: request.num_prompt_tokens]
        for index, processor in enumerate(self._processors):
            try:
                is_in = bool(processor.admit(row, request.sampling_params, prompt.copy()))
            except Exception as error:  # a stranger's code: it costs the requests that it is about
                return False, False, _told(processor, "admit", error)
            if is_in and index in self._broken:
                return False, False, self._broken[index]
            self._takes_part[index, row] = is_in
        taking = np.flatnonzero(self._takes_part[:, row])
        return len(taking) > 0, any(self._processors[index].needs_token_ids for index in taking), None

    def clear(self, row: int) -> None:
        for index in np.flatnonzero(self._takes_part[:, row]).tolist():
            self._takes_part[index, row] = False
            try:
                self._processors[index].remove(row)
            except Exception as error:  # as above; what it keeps of its rows may be wrong from now on
                self._broken[index] = _told(self._processors[index], "remove", error)

    def take_part(self, rows: np.ndarray) -> bool:
        """Whether any of rows [n] does."""
        return bool(self._processors) and bool(self._takes_part[:, rows].any())

    def apply(self, logits: torch.Tensor, rows: np.ndarray, generated: Callable[[int], np.ndarray]) -> dict[int, str]:
        """Changes logits [n, vocab_size] float32 of rows [n]; -> what went wrong, by row.

        generated: what a row has written, [num_generated] int32; asked only for processors that need it.
        """
        failed: dict[int, str] = {}
        for processor, members in zip(self._processors, self._takes_part[:, rows], strict=True):
            places = np.flatnonzero(members)
            if not len(places):
                continue
            taking = rows[places].copy()
            token_ids = [generated(row).copy() for row in taking.tolist()] if processor.needs_token_ids else None
            try:
                _apply_to(processor, logits, places, taking, token_ids)
            except Exception as error:  # as above
                told = _told(processor, "apply", error)
                failed |= {row: told for row in rows[places].tolist() if row not in failed}
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
    index = torch.from_numpy(places)
    if logits.is_cuda:
        index = index.pin_memory().to(logits.device, non_blocking=True)
    taken = logits[index]
    processor.apply(taken, rows, token_ids)
    logits.index_copy_(0, index, taken)


def _made(name: str, context: LogitsProcessorContext) -> LogitsProcessor:
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


def _told(processor: LogitsProcessor, method: str, error: Exception) -> str:
    return f"the logits processor {type(processor).__qualname__} raised in {method}: {type(error).__name__}: {error}"
