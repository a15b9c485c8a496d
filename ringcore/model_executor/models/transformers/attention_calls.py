"""Recorded passes on meta: what a model computes between its tokens, or why it cannot run over a KV cache.

A model runs here if its tokens meet in attention calls alone, one in each layer, whose masks are causal, perhaps with a
window. That is looked for in what the model does, not in what it is called: an attention function and a mask function
registered with transformers record the calls and their masks, and a dispatch mode sees every other operation. The
passes have no values, so a model that asks for one on the host (to decide by the longest sequence of a batch) is
refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

__all__ = ["RECORD", "AttentionCall", "Refused", "in_one_line", "record"]

RECORD = "ringcore_record"  # the name of the recording functions in transformers' interfaces
# What attention functions are told that does not change what they compute, or that is recorded.
_KNOWN = frozenset(
    {"scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache"}
)
_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)
_MAX_REASON = 160  # characters
_MAX_ROW = 1 << 18  # positions of a mask that are looked at


class Refused(Exception):
    """Why a model cannot run, in one line."""


def in_one_line(error: Exception) -> str:
    """Of an error that transformers or a model raises."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MAX_REASON]}"


@dataclass(frozen=True, slots=True)
class AttentionCall:
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    sliding_window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class _Mask:
    """What stands for a mask in a recorded pass: the rule that transformers would make it by."""

    allows: Callable[..., torch.Tensor]  # (batch, head, query position, key position) -> bool

    def sliding_window(self, num_positions: int) -> int | None:
        """The window of a causal mask, None where it is over all. Raises `Refused` for any other mask."""
        length = min(num_positions, _MAX_ROW)
        window = int(self._row(length - 1, length).sum())
        keys = torch.arange(length)
        rows = {0, 1, 2, window - 1, window, window + 1, 2 * window, 3 * window // 2, length // 2, length - 1}
        for row in sorted(row for row in rows if 0 <= row < length):
            if not torch.equal(self._row(row, length), (keys <= row) & (keys > row - window)):
                raise Refused("its attention has a mask that is neither causal nor a sliding window")
        return None if window == length else window

    def _row(self, query: int, length: int) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.long)
        try:
            allowed = self.allows(zero, zero, torch.tensor(query), torch.arange(length))
        except Exception as error:  # a rule that closes over tensors of the pass, which have no values
            raise Refused("its attention has a mask that depends on more than positions") from error
        return torch.as_tensor(allowed).expand(length)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The arguments of one call; what they mean is looked at after the pass, with values."""

    module: nn.Module
    query: torch.Tensor  # [1, num_heads, num_tokens, head_size]
    key: torch.Tensor  # [1, num_kv_heads, num_tokens, head_size]
    value: torch.Tensor
    mask: object
    given: Mapping[str, Any]

    def call(self, num_positions: int, is_masked: bool) -> AttentionCall:
        given = self.given
        if unknown := sorted(name for name, value in given.items() if name not in _KNOWN and _matters(value)):
            raise Refused(f"its attention is given {unknown[0]!r}, which is not computed")
        if given.get("is_causal") is False or (given.get("is_causal") is None and not _is_causal(self.module)):
            raise Refused("its attention looks at later tokens")
        sinks = given.get("s_aux")
        if sinks is not None and sinks.shape != self.query.shape[1:2]:
            raise Refused(f"its attention has {sinks.numel()} sinks for {self.query.shape[1]} heads")
        head_size, scale = self.query.shape[-1], given.get("scaling")
        return AttentionCall(
            self.module,
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_size=head_size,
            v_head_size=self.value.shape[-1],
            scale=head_size**-0.5 if scale is None else float(scale),
            sliding_window=self._window(num_positions, is_masked),
            softcap=given.get("softcap"),
            has_sinks=sinks is not None,
        )

    def _window(self, num_positions: int, is_masked: bool) -> int | None:
        """By the mask, which says it in full; a number that is passed beside it must say the same."""
        stated: int | None = self.given.get("sliding_window")
        if not is_masked and self.mask is None:
            return stated
        if not isinstance(self.mask, _Mask):
            raise Refused("its attention is given a mask of the model's own making")
        window = self.mask.sliding_window(num_positions)
        if stated is not None and window != (stated if stated < min(num_positions, _MAX_ROW) else None):
            raise Refused(f"its attention is given a window of {stated} tokens and a mask of another")
        return window


def _matters(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_causal(module: nn.Module) -> bool:
    return bool(vars(module).get("is_causal", True))


def _recording_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    ringcore: list[_Recorded] | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    if ringcore is None:
        raise Refused("it does not pass its keyword arguments on to its attention")
    ringcore.append(_Recorded(module, query, key, value, attention_mask, given))
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _recording_mask(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> _Mask:
    return _Mask(mask_function)


AttentionInterface.register(RECORD, _recording_attention)
AttentionMaskInterface.register(RECORD, _recording_mask)
AttentionInterface.register(f"{RECORD}_unmasked", _recording_attention)


_OVER_ONE_DIM = frozenset({"_softmax", "cumsum", "cumprod", "logcumsumexp", "slice", "select", "unbind"})
_OVER_DIMS = frozenset({"max", "min", "amax", "amin", "argmax", "sum", "mean", "var", "any", "all", "flip", "roll"})


class _TokenMixing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's has no types
    """Refuses operations that mix the tokens of a pass outside attention: those over a dimension of its length, a prime
    that is no size of the model."""

    def __init__(self, model: PreTrainedModel, num_tokens: int, positions: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._num_tokens = num_tokens
        kept = [*model.parameters(), *model.buffers()]
        self._kept = {tensor.untyped_storage()._cdata for tensor in kept}
        self._positions = positions.untyped_storage()._cdata
        self.reads_positions = self.counts_positions = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        if self._positions in storages:
            self.reads_positions = True
        if func._schema.is_mutable and storages and storages[0] in self._kept:
            raise Refused("a pass changes the model itself, by the tokens that happen to be in it")
        if name == "arange" and out.numel() == self._num_tokens:
            self.counts_positions = True
        if self._mixes(name, tensors, args, out):
            raise Refused(f"its tokens meet outside attention, in {name}, of which the KV cache holds nothing")
        return out

    def _mixes(self, name: str, tensors: list[torch.Tensor], args: tuple[Any, ...], out: Any) -> bool:
        if not tensors:
            return False
        shape = tensors[0].shape
        if name == "convolution":
            return True
        if name in ("mm", "bmm", "baddbmm", "addmm"):
            return tensors[-1].shape[-2] == self._num_tokens
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


def record(
    model: PreTrainedModel, num_positions: int, *, is_masked: bool = False, has_positions: bool = True
) -> list[AttentionCall]:
    """The attention calls of a pass of the model's body, which is on meta, in order. Raises `Refused`.

    is_masked: transformers makes masks, from which the windows are read; else the pass is as those of the engine are,
    without masks, and the windows are those that the calls state. has_positions: without, the model makes its own, and
    is refused where it does more than count.
    """
    num_tokens, recorded = _unused_prime(model), list[_Recorded]()
    positions = torch.arange(num_tokens, device="meta")[None]
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "use_cache": False, "ringcore": recorded}
    if has_positions:
        inputs["position_ids"] = positions
    if is_masked:  # no token is padding; without this, transformers looks for several sequences in the position ids
        inputs["attention_mask"] = torch.ones(1, num_tokens, dtype=torch.long, device="meta")
    model.config._experts_implementation = "batched_mm"  # the others ask for the chosen experts on the host
    model.config._attn_implementation = RECORD if is_masked else f"{RECORD}_unmasked"
    # Masks are made from positions, by operations over all of them; what mixes tokens is seen in the passes without.
    mixing = None if is_masked else _TokenMixing(model, num_tokens, positions)
    try:
        with torch.device("meta"), mixing or nullcontext():
            model.base_model(**inputs)
    except Refused:
        raise
    except Exception as error:  # whatever the model's own code raises where it meets something without a value
        raise Refused(f"a pass without values fails: {in_one_line(error)}") from error
    if mixing is not None and has_positions and mixing.counts_positions and not mixing.reads_positions:
        raise Refused("it counts the positions of its tokens itself")
    return [one.call(num_positions, is_masked) for one in recorded]


def _unused_prime(model: PreTrainedModel) -> int:
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    sizes |= {value for value in model.config.get_text_config().to_dict().values() if isinstance(value, int)}
    return next(prime for prime in _PRIMES if prime not in sizes)
