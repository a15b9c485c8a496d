"""A model of transformers as a stage of a pipeline: its body runs, with other stages' layers left out of it.

A later stage runs the body on ids that mean nothing: what comes before its layers (masks, angles) is computed as
always, and its first layer is given what the previous stage has sent in place of their embedding. What follows its last
layer (a norm), if that is not the model's, is of no use. So a layer must read nothing of earlier layers but the output
of the one before, no keys and values either, and the body's result nothing but that of the last: all are looked for in
a recorded pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ringcore.distributed.parallel import Stage
from ringcore.model_executor.models.transformers.attention_calls import record
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.fusion.forward_pass import pass_of
from ringcore.model_executor.models.transformers.fusion.fused_layer import FusedLayer
from ringcore.model_executor.models.transformers.refusal import Refused
from ringcore.model_executor.residual import Residual
from ringcore.model_executor.stages import layers_of, total_bytes
from ringcore.model_executor.weight import Weight

__all__ = ["LayerChain", "StagedBody", "read_chain"]


@dataclass(frozen=True, slots=True)
class LayerChain:
    """Layers that are computed one after the other. paths: their names in the body. hidden: the keyword by which each
    is given the output of the one before; None: by position. num_results: of the tuple that it returns; None: a
    tensor."""

    paths: Sequence[str]
    hidden: Sequence[str | None]
    num_results: Sequence[int | None]


def read_chain(body: Body, paths: Sequence[str], num_layers: int, num_positions: int) -> LayerChain:
    """Of a body on meta. Raises `Refused` where its layers are not a chain."""
    if len(paths) != num_layers:
        raise Refused(f"{num_layers - len(paths)} of its layers are in no list of layers, by which stages are made")
    watch = _Watch(paths)
    with watch.on(body.module), torch.enable_grad():
        calls = record(body, num_positions)
    shared = [paths[place] for place, call in enumerate(calls) if call.kv_source is not None]
    if shared:
        raise Refused(f"{shared[0]} reads keys and values of an earlier layer, which stages do not hand on")
    watch.check_result()
    return LayerChain(paths, [watch.hidden[path] for path in paths], [watch.num_results[path] for path in paths])


@dataclass(slots=True)
class _Watch:
    """The results of layers are leaves of autograd's graph: whatever is computed of one leads back to it."""

    paths: Sequence[str]
    hidden: dict[str, str | None] = field(default_factory=dict)
    num_results: dict[str, int | None] = field(default_factory=dict)
    _last: torch.Tensor | None = None  # the output of the layer before, as the body has it
    _leaf: torch.Tensor | None = None
    _result: Any = None

    @contextmanager
    def on(self, body: nn.Module) -> Iterator[None]:
        handles = [body.register_forward_hook(lambda *call: setattr(self, "_result", call[-1]))]
        for path in self.paths:
            layer = body.get_submodule(path)
            handles.append(layer.register_forward_pre_hook(self._before(path), with_kwargs=True))
            handles.append(layer.register_forward_hook(self._after(path)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, path: str) -> Any:
        def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = [*enumerate(args), *kwargs.items()]
            found = [key for key, value in given if self._last is not None and value is self._last]
            if self._last is not None and found not in ([0], ["hidden_states"]):
                raise Refused(f"{path} is not given the output of the layer before, as stages of a pipeline need it")
            others = [value for value in tree_leaves((args, kwargs)) if value is not self._last]
            if any(isinstance(one, torch.Tensor) and one.requires_grad for one in others):
                raise Refused(f"{path} reads more of earlier layers than stages of a pipeline hand on")
            self.hidden[path] = None if found in ([], [0]) else str(found[0])

        return look

    def _after(self, path: str) -> Any:
        def cut(layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            is_tuple = isinstance(output, tuple)
            self.num_results[path] = len(output) if is_tuple else None
            result, *others = output if is_tuple else (output,)
            if any(isinstance(one, torch.Tensor) for one in tree_leaves(others)):
                raise Refused(f"{path} returns more than its hidden states, which stages of a pipeline do not hand on")
            self._leaf = result.detach().requires_grad_()
            self._last = self._leaf.clone()  # a leaf itself may not be written to
            return (self._last, *others) if is_tuple else self._last

        return cut

    def check_result(self) -> None:
        """That the body's result is of the last layer's output alone."""
        leaves = set(_leaves(self._result.last_hidden_state))
        if leaves - {self._leaf}:
            raise Refused("its last hidden states are of several layers, which stages of a pipeline do not hand on")


def _leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    left, seen = [tensor.grad_fn], set[Any]()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = vars(type(node)).get("variable")
        if variable is not None:
            yield node.variable  # type: ignore[attr-defined]
        left += [following for following, _ in node.next_functions]


class _Elsewhere(nn.Module):
    """In place of a layer of another stage: passes on what it is given. A body may read its other attributes."""

    def __init__(self, replaced: nn.Module, hidden: str | None, num_results: int | None) -> None:
        super().__init__()
        self._hidden, self._num_results = hidden, num_results
        for name, value in vars(replaced).items():
            if isinstance(value, str | int | float) and name not in vars(self):
                setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs[self._hidden or "hidden_states"]
        return hidden if self._num_results is None else (hidden, *[None] * (self._num_results - 1))


class _NoEmbedding(nn.Module):
    """In place of an embedding whose rows no layer of the stage reads. A body may ask its table for a device."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", torch.empty(0, width, dtype=dtype, device="cpu"))

    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        table = self.get_buffer("weight")
        return table.new_zeros(*input_ids.shape, table.shape[1])


class StagedBody:
    """The layers of a stage, and what it has besides: the embedding in the first stage, the head in the last one, and
    in each what is in none of these, which is small."""

    def __init__(self, body: Body, chain: LayerChain, stage: Stage, weights: Mapping[str, Sequence[Weight]]) -> None:
        """weights: those of the whole model, by the name in it of a module or tensor that they are of."""
        self._body, self._chain, self.stage = body, chain, stage
        model = body.model
        names = {module: name for name, module in model.named_modules()}
        self._embedding = names[model.get_input_embeddings()]
        self._head = names.get(model.get_output_embeddings())
        self._is_tied = self._head is not None and f"{self._head}.weight" in model.all_tied_weights_keys
        self._layers = [f"{body.path}.{path}" for path in chain.paths]
        sizes = [total_bytes(_within(layer, weights)) for layer in self._layers]
        before, head = total_bytes(_within(self._embedding, weights)), total_bytes(_within(self._head, weights))
        after = before + head if self._is_tied else head
        self.own = layers_of(stage, sizes, before, after)

    def has(self, name: str) -> bool:
        """Whether a module or tensor of this name in the model is of the stage."""
        layer = next((index for index, path in enumerate(self._layers) if _is_in(name, path)), None)
        if layer is not None:
            return layer in self.own
        if _is_in(name, self._embedding):
            return self.stage.is_first or (self.stage.is_last and self._is_tied)
        return self.stage.is_last or self._head is None or not _is_in(name, self._head)

    def install(self, dtype: torch.dtype) -> None:
        """Takes what the stage has not out of the model, and connects its layers with the other stages."""
        model, body, chain = self._body.model, self._body.module, self._chain
        for index, path in enumerate(chain.paths):
            if index not in self.own:
                absent = _Elsewhere(body.get_submodule(path), chain.hidden[index], chain.num_results[index])
                body.set_submodule(path, absent)
        if not self.has(self._embedding):
            table = model.get_input_embeddings().weight
            model.set_submodule(self._embedding, _NoEmbedding(table.shape[-1], dtype))
        if not self.stage.is_last and self._head is not None:
            model.set_submodule(self._head, nn.Identity())
        if not self.stage.is_first:
            enter = _Entrance(chain.hidden[self.own.start])
            body.get_submodule(chain.paths[self.own.start]).register_forward_pre_hook(enter, with_kwargs=True)
        if not self.stage.is_last:
            last = body.get_submodule(chain.paths[self.own.stop - 1])
            last.register_forward_hook(_leave, with_kwargs=True)

    def ties(self, name: str, source: str) -> bool:
        """Whether both of two tied tensors are of the stage."""
        return self.has(name) and self.has(source)


@dataclass(frozen=True, slots=True)
class _Entrance:
    """Gives a layer what the previous stage has sent: as the residual stream, with which our layer may go on, and as
    the hidden states that the body would give it."""

    hidden: str | None

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = pass_of(args, kwargs)
        assert given.received is not None
        given.stream = Residual(given.received.clone()) if isinstance(layer, FusedLayer) else None
        placeholder = args[0] if self.hidden is None else kwargs[self.hidden]
        hidden = given.received.to(placeholder.dtype, copy=True)[None]
        return ((hidden, *args[1:]), kwargs) if self.hidden is None else (args, {**kwargs, self.hidden: hidden})


def _leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """The stream before any norm; where the next stage goes on with it, in its units."""
    given = pass_of(args, kwargs)
    if isinstance(layer, FusedLayer):
        assert given.ended is not None
        given.left = given.ended.rows if given.stream is not None else layer.in_units_of_body(given.ended)
    else:
        hidden = output[0] if isinstance(output, tuple) else output
        given.left = hidden[0].float()


def _is_in(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}.")


def _within(path: str | None, weights: Mapping[str, Sequence[Weight]]) -> Iterable[Weight]:
    return [one for name, of_name in weights.items() if path is not None and _is_in(name, path) for one in of_name]
