"""A sample pass: a copy of a model's body with random weights, run once in float32 on the CPU, every call recorded.

The copy has the sizes of the model, but each linear is the product of two thin matrices, and an embedding has few rows:
so a pass of a large model costs milliseconds. Sublayers with other large tensors (experts) are replaced by a function
of their input: what is around them can be compared all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel

from ringcore.model_executor.models.transformers.attention_calls import in_one_line
from ringcore.model_executor.models.transformers.construction import make_buffers
from ringcore.model_executor.models.transformers.fusion.sample_modules import (
    EMBEDDING_SIZE,
    NotRecognised,
    SampleLinear,
    SampleNumbers,
    fill,
    replace_large,
)
from ringcore.model_executor.models.transformers.handed_down import given_to_body, handed_down

__all__ = ["Call", "Heads", "NotRecognised", "SampleLinear", "SamplePass", "attend", "cosines_and_sines", "run_sample"]

_SAMPLE = "ringcore_sample"  # the name of `_sample_attention` in transformers' interface
_NUM_TOKENS = 6
_MAX_INPUT = 2 * EMBEDDING_SIZE  # of the first layer
_POSITION_STEP = 3  # between tokens, so that an angle of a position is not that of a token's index


@dataclass(frozen=True, slots=True)
class Heads:
    """The arguments of an attention call."""

    query: torch.Tensor  # [1, num_heads, num_tokens, head_size]
    key: torch.Tensor  # [1, num_kv_heads, num_tokens, head_size]
    value: torch.Tensor  # [1, num_kv_heads, num_tokens, v_head_size]
    sinks: torch.Tensor | None  # [num_heads]


@dataclass(frozen=True, slots=True)
class Call:
    """Of a module: its arguments and result."""

    name: str  # of the module in the body
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    hidden: torch.Tensor  # the first argument as it was before the call, which may write to it

    @property
    def result(self) -> torch.Tensor:
        """The output, or its first entry."""
        out = self.output[0] if isinstance(self.output, tuple) else self.output
        if not isinstance(out, torch.Tensor):
            raise NotRecognised(f"{self.name} returns {type(out).__name__}")
        return out

    def tensors(self) -> list[torch.Tensor]:
        """Of its arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Tensor)]


@dataclass(slots=True)
class SamplePass:
    """What was recorded, in the order in which the calls ended."""

    body: nn.Module
    positions: torch.Tensor  # [1, num_tokens]
    heads: dict[nn.Module, Heads] = field(default_factory=dict)  # by the module that makes the attention call
    calls: list[Call] = field(default_factory=list)

    @property
    def rotaries(self) -> list[Call]:
        """Those that may have computed cosines and sines: a pair of [1, num_tokens, any width], or one such tensor of
        complex numbers."""
        return [call for call in self.calls if _may_be_angles(call.output)]

    def within(self, path: str) -> list[Call]:
        """The calls of modules below `path`."""
        return [call for call in self.calls if call.name.startswith(f"{path}.")]

    def of(self, path: str) -> Call:
        """The one call of the module. Raises `NotRecognised` where it was called otherwise than once."""
        found = [call for call in self.calls if call.name == path]
        if len(found) != 1:
            raise NotRecognised(f"{path} is called {len(found)} times in a pass")
        return found[0]

    def again(self, call: Call) -> Heads:
        """Calls the module around an attention call once more, as in `call`; -> its heads."""
        self.heads.clear()
        try:
            call.module(*call.args, **call.kwargs)
        except Exception as error:  # whatever the model's own code raises
            raise NotRecognised(f"{call.name} cannot be called again: {in_one_line(error)}") from error
        (heads,) = self.heads.values()
        return heads


def cosines_and_sines(output: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the output of a rotary embedding: [1, num_tokens, any width] each."""
    if isinstance(output, torch.Tensor):
        return output.real, output.imag
    assert isinstance(output, tuple), output
    cos, sin = output
    return cos, sin


def _may_be_angles(output: object) -> bool:
    if isinstance(output, torch.Tensor):
        return output.is_complex() and output.dim() == 3
    return (
        isinstance(output, tuple)
        and len(output) == 2
        and all(isinstance(x, torch.Tensor) and x.dim() == 3 for x in output)
        and output[0].shape == output[1].shape
    )


def attend(heads: Heads, scale: float) -> torch.Tensor:
    """Causal attention of one sequence, without windows, softcap or sinks: [1, num_tokens, num_heads, v_head_size]."""
    repeats = heads.query.shape[1] // heads.key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (heads.key, heads.value))
    scores = (heads.query @ key.transpose(2, 3)) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, float("-inf")).softmax(-1) @ value).transpose(1, 2).contiguous()


def _sample_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    ringcore: SamplePass | None = None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    sample: SamplePass = handed_down(ringcore, attention_mask)
    heads = sample.heads[module] = Heads(query, key, value, s_aux)
    return attend(heads, query.shape[-1] ** -0.5 if scaling is None else scaling), None


AttentionInterface.register(_SAMPLE, _sample_attention)


def run_sample(
    body: PreTrainedModel, layers: Sequence[str], attentions: Sequence[str], num_positions: int, in_mask: bool
) -> SamplePass:
    """body: on meta; layers and attentions: the names in it of its decoder layers and of their attention sublayers.
    num_positions: of the model. in_mask: see `Body`. Raises `NotRecognised` where a copy of it cannot be run."""
    numbers = SampleNumbers(seed=0)
    body = copy.deepcopy(body)
    make_buffers(body)
    body.config.dtype = torch.float32
    body.config._attn_implementation = _SAMPLE
    for layer, attention in zip(layers, attentions, strict=True):
        replace_large(body, layer, attention, numbers)
    fill(body, numbers)
    ids = numbers.ids(1, _NUM_TOKENS)
    positions = _POSITION_STEP * torch.arange(_NUM_TOKENS)[None]
    far = positions.clone()
    far[0, -1] = max(num_positions - 1, int(far[0, -1]))  # some scale queries by their position, beyond thousands
    for tried in (far, positions):
        with suppress(IndexError):  # a table of positions, of which a sample has few rows
            sample = _run(body, ids, tried, in_mask)
            size = _input_size(sample, layers)
            if size <= _MAX_INPUT:
                return sample
            body.get_input_embeddings().weight.mul_(EMBEDDING_SIZE / size)
            return _run(body, ids, tried, in_mask)
    raise NotRecognised("a sample pass fails: an index is out of range")


def _input_size(sample: SamplePass, layers: Sequence[str]) -> float:
    """The root mean square of what the first layer is given. Some models multiply their embeddings: what a layer adds
    to numbers of hundreds has lost the digits by which formulas are told apart."""
    given = (call.hidden for call in sample.calls if call.name in layers[:1])
    return max((float(rows.float().square().mean().sqrt()) for rows in given), default=0.0)


def _run(body: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, in_mask: bool) -> SamplePass:
    sample = SamplePass(body, positions)
    try:
        with torch.no_grad(), _recorded(sample):
            body(input_ids=ids, position_ids=positions, use_cache=False, **given_to_body(sample, in_mask))
    except IndexError:
        raise
    except Exception as error:  # whatever the model's own code raises with stand-ins for its parts
        raise NotRecognised(f"a sample pass fails: {in_one_line(error)}") from error
    return sample


@contextmanager
def _recorded(sample: SamplePass) -> Iterator[None]:
    inputs: list[torch.Tensor | None] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor)), None)
        inputs.append(None if first is None else first.clone())

    def recorder(name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            hidden = inputs.pop()
            if hidden is not None:
                sample.calls.append(Call(name, module, args, kwargs, output, hidden))

        return after

    handles = []
    for name, module in sample.body.named_modules():
        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(recorder(name), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
