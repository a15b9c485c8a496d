"""How what we give a model's body reaches its attention calls and our layers: it hands its keyword arguments down.

Some models keep these to themselves, but hand down their mask, and one of four dimensions as it is. To these it is
given in an empty mask as well.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["given_to_body", "handed_down"]


class _Carrier(torch.Tensor):
    """A mask of nothing, [1, 1, 0, 0]."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    ringcore: object


def given_to_body(ringcore: object, in_mask: bool) -> dict[str, Any]:
    """Keyword arguments."""
    if not in_mask:
        return {"ringcore": ringcore}
    carrier = torch.empty(1, 1, 0, 0).as_subclass(_Carrier)
    carrier.ringcore = ringcore
    return {"ringcore": ringcore, "attention_mask": carrier}


def handed_down(ringcore: Any, *others: object) -> Any:
    """What the body was given, in a call to which it hands its arguments down: `ringcore` itself, or the one in a mask
    among the others. None where it has handed down neither."""
    if ringcore is not None:
        return ringcore
    return next((other.ringcore for other in others if isinstance(other, _Carrier)), None)
