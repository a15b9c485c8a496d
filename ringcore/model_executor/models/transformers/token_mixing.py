"""Follows through a recorded pass what is computed from several tokens at once, outside attention.

Such a result is found by its shape: an operation over a dimension of the pass's length, a prime that is no size of the
model. From there on all that is computed from it is followed, by the storages of tensors. The model is refused where it
reaches an attention call or the hidden states; a result that nothing uses does no harm.

In the same way the tokens' own count is followed: `arange` over the pass is the index of a token in its batch, which is
its position in a pass over one sequence only. It may select rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ringcore.model_executor.models.transformers.needs import Need
from ringcore.model_executor.models.transformers.operation_mode import OperationMode
from ringcore.model_executor.models.transformers.refusal import CountsPositions, Refused

__all__ = ["TokenMixing", "tensors_of"]

_OVER_ONE_DIM = frozenset({"_softmax", "cumsum", "cumprod", "logcumsumexp", "slice", "select", "unbind", "sort"})
_OVER_DIMS = frozenset({"max", "min", "amax", "amin", "argmax", "sum", "mean", "var", "any", "all", "flip", "roll"})
_BY_INDEX_OF_DIM = frozenset({"index_select", "gather", "scatter", "scatter_add", "index_add", "index_copy"})
_COUNTED = "it counts the positions of its tokens itself"


class TokenMixing(OperationMode):
    def __init__(self, model: PreTrainedModel, num_tokens: int, before: torch.Tensor | None = None) -> None:
        """before: where the pass is told how many tokens are before each (`TokensBefore`), by which an index becomes a
        position."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens, self._before = num_tokens, before
        self._kept = {_storage(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        self.read: set[int] = set()  # the storages that an operation has read
        self._reasons: dict[int, str] = {}  # by storage: why its tensors are not of one token each
        self._order: list[str] = []  # the reasons as they were found
        self._needs: dict[str, Need] = {}  # by reason
        self._alive: list[torch.Tensor] = []  # of these storages, so that no other one gets their address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name, out = func.overloadpacket.__name__, func(*args, **kwargs)
        tensors = tensors_of([*args, *kwargs.values()])
        changed = tensors[:1] if func._schema.is_mutable else []
        if changed and _storage(changed[0]) in self._kept:
            why = "a pass changes the model itself, by the tokens that happen to be in it"
            raise Refused(why, Need.INDEPENDENCE)
        self.read.update(map(_storage, tensors))
        reason = self._reason(name, tensors, args, out)
        if reason is not None:
            for tensor in (*tensors_of([out]), *changed):
                self._reasons.setdefault(_storage(tensor), reason)
                self._alive.append(tensor)
        return out

    def check(self, *tensors: torch.Tensor | None) -> None:
        """Raises `Refused` where one of them is not computed token by token."""
        reason = self._first(tensor for tensor in tensors if tensor is not None)
        if reason is not None:
            if reason == _COUNTED:
                raise CountsPositions(reason, Need.POSITIONS)
            raise Refused(reason, self._needs[reason])

    def follows(self, tensor: torch.Tensor) -> bool:
        """Whether it is not known to be computed token by token."""
        return _storage(tensor) in self._reasons

    @property
    def first_refusal(self) -> Refused | None:
        """Why the model would be refused if everything were used."""
        return Refused(self._order[0], self._needs[self._order[0]]) if self._order else None

    def _first(self, tensors: Iterable[torch.Tensor]) -> str | None:
        """The reason that was found first; counting only where there is no other."""
        storages = [*map(_storage, tensors)]
        found = {self._reasons[one] for one in storages if one in self._reasons}
        return next((reason for reason in self._order if reason in found), _COUNTED if _COUNTED in found else None)

    def _reason(self, name: str, tensors: list[torch.Tensor], args: tuple[Any, ...], out: Any) -> str | None:
        inherited = self._first(tensors)
        if inherited not in (None, _COUNTED):
            return inherited
        if self._mixes(name, tensors, args, out):
            reason = f"its tokens meet outside attention, in {name}, of which the KV cache holds nothing"
            if reason not in self._order:
                self._order.append(reason)
                self._needs[reason] = Need.of_operation(name)
            return reason
        if name == "arange" and out.numel() == self._num_tokens:
            return _COUNTED
        is_position = name == "add" and any(tensor is self._before for tensor in tensors)
        return None if is_position or self._selects_rows(name, args) else inherited

    def _selects_rows(self, name: str, args: tuple[Any, ...]) -> bool:
        """Whether counts that are an index here are one of the pass's rows, and not of some table."""
        if name in ("index", "index_put"):
            dims = [dim for dim, index in enumerate(args[1]) if index is not None and self._is_counted(index)]
        elif name in _BY_INDEX_OF_DIM:
            dims = [args[1]] if self._is_counted(args[2]) else []
        else:
            return False
        others = [*args[:1], *args[2 if name.startswith("index_put") or name == "index" else 3 :]]
        return all(args[0].shape[dim] == self._num_tokens for dim in dims) and not any(
            self._is_counted(other) for other in tensors_of(others)
        )

    def _is_counted(self, tensor: torch.Tensor) -> bool:
        return self._reasons.get(_storage(tensor)) == _COUNTED

    def _mixes(self, name: str, tensors: list[torch.Tensor], args: tuple[Any, ...], out: Any) -> bool:
        if not tensors:
            return False
        shape = tensors[0].shape
        if name == "convolution":
            return True
        if name in ("mm", "bmm", "baddbmm", "addmm"):
            return tensors[-1].shape[-2] == self._num_tokens or out.shape[-2:] == (self._num_tokens, self._num_tokens)
        if name in _OVER_ONE_DIM and len(shape) > 1:
            dim = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
            return shape[dim] == self._num_tokens and not (name == "slice" and out.shape == shape)
        if name in _OVER_DIMS:
            given = args[1] if len(args) > 1 and isinstance(args[1], int | list) else None
            dims = range(len(shape)) if given in (None, []) else [given] if isinstance(given, int) else given
            return any(shape[dim] == self._num_tokens for dim in dims or ())
        if name == "constant_pad_nd":
            return any(a == self._num_tokens != b for a, b in zip(shape, out.shape, strict=True))
        return False


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """Those among the arguments of an operation, or its results, and in their lists."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [one for one in value if isinstance(one, torch.Tensor)]
    return found


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
