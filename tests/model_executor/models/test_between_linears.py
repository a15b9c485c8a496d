"""What lies between two linears of a module: computed share by share, or of whole rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ringcore.model_executor.models.transformers.between_linears import is_share_by_share


class MLP(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, device=device) for sizes in ((8, 12), (8, 12), (12, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.gate(x), self.up(x)))

    def between(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate) * up


class Sparse(MLP):
    """As Gemma 3n."""

    def between(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        least = gate.mean(-1, keepdim=True) + gate.std(-1, keepdim=True)
        return nn.functional.relu(gate - least) * up


class Normed(MLP):
    def between(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(gate * up, gate.shape[-1:])


class Asking(Sparse):
    """What it asks for is not there."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * mask


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("kind", "expected"), [(MLP, True), (Sparse, False), (Normed, False), (Asking, True)])
def test_activations_are_computed_share_by_share(device, kind, expected):
    module = kind(device)
    before = dict(module.named_modules())
    with torch.device(device):
        assert is_share_by_share(module, ["gate", "up"], ["down"], 2) == expected
    assert dict(module.named_modules()) == before
