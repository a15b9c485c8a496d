"""Whether a model's pass can be captured in a CUDA graph, as far as a pass on meta tells.

A model that asks for a value of a tensor on the host fails in every recorded pass, and is refused. What is left are
constants that a pass makes on the host and copies to the device, which a capture does not allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ringcore.model_executor.models.transformers.attention_calls import record
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.meta_shapes import MetaShapes
from ringcore.model_executor.models.transformers.operation_mode import no_checked_values
from ringcore.model_executor.models.transformers.refusal import in_one_line

__all__ = ["kept_from_graphs"]

_NUM_TOKENS = 7
_FROM_NUMBERS = frozenset({torch.tensor, torch.as_tensor, torch.Tensor.new_tensor})


def kept_from_graphs(body: Body) -> str | None:
    """The reason, None if there is none. The body is on meta."""
    record(body, 1)  # which finds out how it is told the positions
    copies = _CopiesFromHost()
    try:
        with MetaShapes(), copies, no_checked_values():
            positions = torch.arange(_NUM_TOKENS, device="meta")
            body(torch.zeros_like(positions), positions, [])
    except Exception as error:  # a tensor on the CPU meets one on meta, as it would meet one on a GPU
        return f"it makes tensors on the host: {in_one_line(error)}"
    return f"it copies constants from the host, in {copies.found}" if copies.found else None


class _CopiesFromHost(TorchFunctionMode):
    """Sees what becomes a tensor of the device out of numbers of the host, or out of tensors there."""

    found: str | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        sources = [arg for arg in args if isinstance(arg, torch.Tensor)]
        is_copy = func in _FROM_NUMBERS or (bool(sources) and not any(source.is_meta for source in sources))
        if isinstance(out, torch.Tensor) and out.is_meta and is_copy:
            self.found = func.__name__
        return out
