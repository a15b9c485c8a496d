"""The order of the sampling stage: the host learns the tokens before the work that only follows from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ringcore.worker.logits import sampling_stage
from ringcore.worker.logits.sampling_stage import ALL_MASKED, SamplingStage


def test_tokens_are_final_then_told_then_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0 has a token, row 1 has none left, and the model's logits of row 2 are not finite."""
    log: list[Any] = []
    adjustments: Any = SimpleNamespace(
        is_adjusted=np.array([True, True, True]),
        adjust=lambda logits, rows, generated, errors: logits.float() - 1,
        count=lambda rows, token_ids: log.append(("count", token_ids.tolist())),
    )
    rows: Any = SimpleNamespace(generated=None, parameters={"num_logprobs": np.array([2, -1, -1])})
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 0.0, 0.0], [torch.nan, 0.0, 0.0]])

    def launch_logprobs(raw: torch.Tensor, token_ids: torch.Tensor, num_logprobs: np.ndarray, by_row: bool) -> None:
        assert not by_row
        assert raw is logits, "not the adjusted ones"
        log.append(("logprobs", token_ids.tolist(), num_logprobs.tolist()))

    monkeypatch.setattr(sampling_stage, "launch_logprobs", launch_logprobs)
    drawn = torch.tensor([2, 2, 2]), torch.tensor([True, False, False])
    stage = SamplingStage(rows, adjustments, is_output_rank=True)
    stage.sample(logits, np.arange(3), lambda _: drawn, lambda ids, ok: log.append(("told", ids.tolist())), {})
    final = [2, ALL_MASKED, 0]
    assert log == [("told", final), ("count", final), ("logprobs", final, [2, -1, -1])]
