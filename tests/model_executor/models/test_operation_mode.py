"""What a pass on meta does not check, also where two threads build models at once."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal

from ringcore.model_executor.models.transformers.operation_mode import no_checked_values


def quantile() -> torch.Tensor:
    with torch.device("meta"):
        return Normal(0, 1).icdf(torch.tensor(0.9))


def test_distributions_take_tensors_without_values():
    with pytest.raises(RuntimeError):
        quantile()
    first, second = no_checked_values(), no_checked_values()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert quantile().is_meta, "one pass of two goes on"
    second.__exit__(None, None, None)
    with pytest.raises(RuntimeError):
        quantile()
