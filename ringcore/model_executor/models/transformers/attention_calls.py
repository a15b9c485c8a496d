"""Recorded passes on meta: what a model computes between its tokens, or why it cannot run over a KV cache.

A model runs here if its tokens meet in attention calls alone, one in each layer, whose masks are causal, perhaps with a
window or in chunks. That is looked for in what the model does, not in what it is called: an attention function and a
mask function registered with transformers record the calls and their masks, and a dispatch mode follows every other
operation. The passes have no values, so a model that asks for one on the host (to decide by the longest sequence of a
batch) is refused too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from traceback import walk_tb
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ringcore.model_executor.models.transformers.alike_layers import Journal, RepeatedLayers
from ringcore.model_executor.models.transformers.body import Body, NewTensors, TokensBefore
from ringcore.model_executor.models.transformers.handed_down import handed_down
from ringcore.model_executor.models.transformers.known_values import KnownValues
from ringcore.model_executor.models.transformers.masks import MAX_ROW, Mask, Reach
from ringcore.model_executor.models.transformers.meta_shapes import MetaShapes
from ringcore.model_executor.models.transformers.needs import Need
from ringcore.model_executor.models.transformers.operation_mode import no_checked_values
from ringcore.model_executor.models.transformers.refusal import (
    CountsPositions,
    KeepsArguments,
    Refused,
    in_one_line,
)
from ringcore.model_executor.models.transformers.token_mixing import TokenMixing

__all__ = ["RECORD", "AttentionCall", "Refused", "in_one_line", "record", "record_masked", "record_whole", "shared_kv"]

RECORD = "ringcore_record"  # the name of the recording functions in transformers' interfaces
# What attention functions are told that does not change what they compute, or that is recorded.
_KNOWN = frozenset(
    {"scaling", "dropout", "is_causal", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache"}
)
_PRIMES = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    sliding_window: int | None
    chunk_size: int | None
    softcap: float | None
    has_sinks: bool
    kv_source: int | None = None  # the place of the first call that is given the same keys and values


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The arguments of one call; what they mean is looked at after the pass, with values."""

    module: nn.Module
    query: torch.Tensor  # [1, num_heads, num_tokens, head_size]
    key: torch.Tensor  # [1, num_kv_heads, num_tokens, head_size]
    value: torch.Tensor
    mask: object
    given: Mapping[str, Any]
    versions: tuple[int, int]  # of key and value: how often they have been written to
    kv_source: int | None  # a place in the record

    def call(self, num_positions: int, is_masked: bool) -> AttentionCall:
        given = self.given
        if unknown := sorted(name for name, value in given.items() if name not in _KNOWN and _matters(value)):
            raise Refused(f"its attention is given {unknown[0]!r}, which is not computed")
        if given.get("is_causal") is False or (given.get("is_causal") is None and not _is_causal(self.module)):
            raise Refused("its attention looks at later tokens", Need.DECODER)
        sinks = given.get("s_aux")
        if sinks is not None and sinks.shape != self.query.shape[1:2]:
            raise Refused(f"its attention has {sinks.numel()} sinks for {self.query.shape[1]} heads")
        head_size, scale = self.query.shape[-1], given.get("scaling")
        reach = self._reach(num_positions, is_masked)
        return AttentionCall(
            self.module,
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_size=head_size,
            v_head_size=self.value.shape[-1],
            scale=head_size**-0.5 if scale is None else float(scale),
            sliding_window=reach.sliding_window,
            chunk_size=reach.chunk_size,
            softcap=given.get("softcap"),
            has_sinks=sinks is not None,
            kv_source=self.kv_source,
        )

    def _reach(self, num_positions: int, is_masked: bool) -> Reach:
        """By the mask, which says it in full; a number that is passed beside it must say the same."""
        stated: int | None = self.given.get("sliding_window")
        if not is_masked and self.mask is None:
            return Reach(sliding_window=stated)
        if not isinstance(self.mask, Mask):
            raise Refused("its attention is given a mask of the model's own making", Need.KNOWN_MASK)
        reach = self.mask.reach(num_positions)
        if stated is not None and reach.sliding_window != (stated if stated < min(num_positions, MAX_ROW) else None):
            raise Refused(f"its attention is given a window of {stated} tokens and a mask of another")
        return reach


def _moved(one: _Recorded, modules: Mapping[nn.Module, nn.Module]) -> _Recorded:
    return replace(one, module=modules.get(one.module, one.module))


def _source(
    recorded: Sequence[_Recorded], key: torch.Tensor, value: torch.Tensor, versions: tuple[int, int]
) -> int | None:
    """The place of the first call with these very tensors, which nothing has written to since."""
    same = (one.key is key and one.value is value and one.versions == versions for one in recorded)
    return next((place for place, is_same in enumerate(same) if is_same), None)


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
    in_mask = attention_mask.carried if isinstance(attention_mask, Mask) else handed_down(None, attention_mask)
    recorded: list[_Recorded] | None = in_mask if ringcore is None else ringcore
    if recorded is None:
        raise KeepsArguments("it does not pass its keyword arguments on to its attention", Need.INTERFACE)
    mask = attention_mask if in_mask is None or isinstance(attention_mask, Mask) else None
    versions = key._version, value._version
    source = _source(recorded, key, value, versions)
    recorded.append(_Recorded(module, query, key, value, mask, given, versions, source))
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


def _recording_mask(*, mask_function: Callable[..., torch.Tensor], **_: Any) -> Mask:
    values = next(mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, KnownValues))
    return Mask(mask_function, values, values.carried)


AttentionInterface.register(RECORD, _recording_attention)
AttentionMaskInterface.register(RECORD, _recording_mask)
AttentionInterface.register(f"{RECORD}_unmasked", _recording_attention)


def record(body: Body, num_positions: int) -> list[AttentionCall]:
    """The attention calls of a pass of a body on meta, in order, as the passes of the engine are: without masks, so
    that only a window that is stated is seen. Raises `Refused`.

    A model that counts the positions of its tokens, though it is given them, is told how many tokens are before each,
    from then on (`Body.counts`). One that hands down no keyword arguments is given them in a mask (`Body.in_mask`).
    """
    while True:
        try:
            return _unmasked_pass(body, num_positions)
        except CountsPositions:
            if body.counts:
                raise
            body.counts = True
        except KeepsArguments:
            if body.in_mask:
                raise
            body.in_mask = True


def shared_kv(body: Body, num_positions: int) -> dict[int, int]:
    """Of a body that `record` has passed: by place, the attention calls that are given the keys and values of an
    earlier one, with its place. Every layer is computed, since a repeated one hands down nothing of its own."""
    calls = _unmasked_pass(body, num_positions, repeats=False)
    return {place: call.kv_source for place, call in enumerate(calls) if call.kv_source is not None}


def record_masked(body: Body, num_positions: int) -> list[AttentionCall]:
    """As `record`, of a pass for which transformers makes masks, from which it is read what a token sees. Raises
    `Refused` also for a model that would give its tokens other positions than those of the engine."""
    given = _MaskedPass(body.model, body.module)
    if not given.sees_the_same_as(_MaskedPass(body.model, body.module, has_positions=False)):
        mixing = TokenMixing(body.model, _unused_prime(body.model))
        _MaskedPass(body.model, body.module, mixing, has_positions=False).check_that_it_counts(mixing)
    return given.calls(num_positions)


def record_whole(model: PreTrainedModel, num_positions: int) -> tuple[list[AttentionCall], set[int]]:
    """As `record_masked`, of all of a model; and the storages that the pass reads."""
    mixing = TokenMixing(model, _unused_prime(model))
    return _MaskedPass(model, model, mixing).calls(num_positions), mixing.read


def _unmasked_pass(body: Body, num_positions: int, repeats: bool = True) -> list[AttentionCall]:
    _set_recording(body.model, f"{RECORD}_unmasked")
    num_tokens, recorded = _unused_prime(body.model), list[_Recorded]()
    with MetaShapes():
        given = body.given(torch.arange(num_tokens, device="meta")[None], recorded)
    cache: TokensBefore | None = given.get("past_key_values")
    mixing = TokenMixing(body.model, num_tokens, None if cache is None else cache.get_seq_length())
    ids = torch.zeros(1, num_tokens, dtype=torch.long, device="meta")
    new = NewTensors(torch.device("meta"))
    layers = RepeatedLayers(body.module, [Journal(recorded, _moved)], lambda one: not mixing.follows(one))
    try:
        with (
            torch.device("meta"),
            MetaShapes(),
            new,
            mixing,
            layers.instead() if repeats else nullcontext(),
            no_checked_values(),
        ):
            out = body.module(input_ids=ids, **given)
    except Refused:
        raise
    except Exception as error:  # whatever the model's own code raises where it meets something without a value
        raise (mixing.first_refusal or _failed(error)) from error
    for one in recorded:
        mixing.check(one.query, one.key, one.value, one.given.get("s_aux"))
    mixing.check(out.last_hidden_state)
    body.makes_tensors = body.makes_tensors or new.was_needed
    if repeats:
        body.alike = layers.found
    return [one.call(num_positions, is_masked=False) for one in recorded]


class _MaskedPass:
    """Masks are made from positions, by operations over all of them; what mixes tokens is seen in the other pass."""

    def __init__(
        self, model: PreTrainedModel, module: nn.Module, mixing: TokenMixing | None = None, has_positions: bool = True
    ) -> None:
        _set_recording(model, RECORD)
        num_tokens, self._recorded, self._values = _unused_prime(model), list[_Recorded](), KnownValues()
        self._values.carried = self._recorded
        inputs = {
            "input_ids": torch.zeros(1, num_tokens, dtype=torch.long, device="meta"),
            # No token is padding; without this, transformers looks for several sequences in the position ids.
            "attention_mask": self._values.known(torch.ones(1, num_tokens, dtype=torch.long)),
        }
        if has_positions:
            inputs["position_ids"] = self._values.known(torch.arange(num_tokens)[None])
        journals = [Journal(self._recorded, _moved), Journal(self._values.met)]
        layers = RepeatedLayers(module, journals, lambda one: self._values.value_of(one) is None)
        try:
            with torch.device("meta"), MetaShapes(), mixing or layers.instead(), self._values, no_checked_values():
                module(**inputs, use_cache=False, ringcore=self._recorded)
        except Refused:
            raise
        except Exception as error:  # as above
            raise _failed(error) from error

    def calls(self, num_positions: int) -> list[AttentionCall]:
        return [one.call(num_positions, is_masked=True) for one in self._recorded]

    def check_that_it_counts(self, mixing: TokenMixing) -> None:
        """Raises `Refused` where positions that the model makes are more than the tokens' own count, as far as is seen
        where they come from a tensor without a value."""
        for one in self._recorded:
            with suppress(CountsPositions):
                mixing.check(one.query, one.key, one.value)

    def sees_the_same_as(self, other: _MaskedPass) -> bool:
        """Whether weights and token ids meet the same values in both."""
        ours, theirs = self._values.met, other._values.met
        pairs = zip(ours, theirs, strict=False)
        return len(ours) == len(theirs) and all(torch.equal(a.double().ravel(), b.double().ravel()) for a, b in pairs)


def _failed(error: Exception) -> Refused:
    """A pass, with this error, in the code of a module."""
    frames = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    where = next((type(module).__name__ for module in reversed(frames) if isinstance(module, nn.Module)), "its body")
    return Refused(f"a pass without values fails in {where}: {in_one_line(error)}", Need.NO_VALUES)


def _set_recording(model: PreTrainedModel, name: str) -> None:
    model.config._experts_implementation = "batched_mm"  # the others ask for the chosen experts on the host
    model.config._attn_implementation = name


def _unused_prime(model: PreTrainedModel) -> int:
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    sizes |= {value for value in model.config.get_text_config().to_dict().values() if isinstance(value, int)}
    return next(prime for prime in _PRIMES if prime not in sizes)
