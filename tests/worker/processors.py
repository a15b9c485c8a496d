"""Logits processors for tests, in a module of their own, as an engine needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ringcore.params.logits_processor import LogitsProcessor, LogitsProcessorContext
from ringcore.params.sampling_params import SamplingParams


class Pushed(LogitsProcessor):
    """Adds `extra_args["push"]` to one token; raises where it is told to."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.pushed: dict[int, int] = {}

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        if not isinstance((params.extra_args or {}).get("push", 0), int):
            raise ValueError("push has to be a token id")

    def admit(self, row: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        args = params.extra_args or {}
        if args.get("fail") == "admit":
            raise LookupError("told to")
        if "push" not in args:
            return False
        assert row not in self.pushed, "a row is removed before it is admitted again"
        self.pushed[row] = args["push"] if args.get("fail") != "apply" else -1
        return True

    def apply(self, logits: Any, rows: np.ndarray, token_ids: Sequence[np.ndarray] | None) -> None:
        assert token_ids is None
        assert logits.shape == (len(rows), self.context.vocab_size)
        for place, row in enumerate(rows.tolist()):
            if self.pushed[row] < 0:
                raise ArithmeticError("told to as well")
            logits[place, self.pushed[row]] += 30

    def remove(self, row: int) -> None:
        del self.pushed[row]


class NoRepeat(LogitsProcessor):
    """Of rows with `extra_args["no_repeat"]`: what was generated among the last so many is not generated again."""

    needs_token_ids: ClassVar[bool] = True

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self.spans: dict[int, int] = {}

    def admit(self, row: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        span = (params.extra_args or {}).get("no_repeat")
        if span is None:
            return False
        self.spans[row] = span
        return True

    def apply(self, logits: Any, rows: np.ndarray, token_ids: Sequence[np.ndarray] | None) -> None:
        assert token_ids is not None
        for place, (row, ids) in enumerate(zip(rows.tolist(), token_ids, strict=True)):
            assert (ids >= 0).all(), "a token that is not known"
            for token_id in ids[-self.spans[row] :].tolist():
                logits[place, token_id] = -float("inf")


class RaisesWhenMade(LogitsProcessor):
    def __init__(self, context: LogitsProcessorContext) -> None:
        raise OSError("no such table")

    def admit(self, row: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        return False

    def apply(self, logits: Any, rows: np.ndarray, token_ids: Sequence[np.ndarray] | None) -> None:
        raise AssertionError


NOT_A_PROCESSOR = int
