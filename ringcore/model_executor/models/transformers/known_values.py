"""The values of those tensors of a pass on meta that depend on no weight and no token id: positions, and what marks
padding. Masks are made from them, and some rules of masks hold such tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

from ringcore.model_executor.models.transformers.operation_mode import OperationMode
from ringcore.model_executor.models.transformers.token_mixing import tensors_of

__all__ = ["KnownValues"]

_WITHOUT_VALUE = ("empty", "new_empty", "rand", "normal")  # what operations begin with that give any values


class KnownValues(OperationMode):
    """Within it an operation whose tensors are all known is computed on the CPU as well, and so is known.

    met: the values that met a tensor that is not known, in order: all that weights and ids see of them. carried: what a
    mask that is made within it carries to the attention calls.
    """

    carried: Any = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By id of the tensor on meta, which is kept so that no other one gets its id.
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.met: list[torch.Tensor] = []

    def known(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor on meta with this value."""
        return self._keep(torch.empty_like(value, device="meta"), value)

    def value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """None where it is not known."""
        if not tensor.is_meta:
            return tensor
        return self._values[id(tensor)][1] if id(tensor) in self._values else None

    def _keep(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._values[id(tensor)] = tensor, value
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = tensors_of([*args, *kwargs.values()])
        found = [value for tensor in tensors if (value := self.value_of(tensor)) is not None]
        if len(found) < len(tensors):
            self.met += found
            return func(*args, **kwargs)
        is_on_meta = kwargs.get("device") == torch.device("meta") or any(tensor.is_meta for tensor in tensors)
        if not is_on_meta or func.overloadpacket.__name__.startswith(_WITHOUT_VALUE):
            return func(*args, **kwargs)
        on_host, named = tree_map(self._on_host, (args, kwargs))
        values = func(*on_host, **named)
        if not tensors_of([values]):
            return values  # a number that the host asks for
        out = func(*args, **kwargs)
        for tensor, value in zip(tensors_of([out]), tensors_of([values]), strict=True):
            self._keep(tensor, value)
        return out

    def _on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        return self.value_of(leaf) if isinstance(leaf, torch.Tensor) else leaf
