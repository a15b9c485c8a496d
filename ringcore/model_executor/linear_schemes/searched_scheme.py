"""Decorates the linear schemes of a model: on a GPU their products compute by the tiles that a search found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT, TokenContext
from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.kernels.linears.found_tiles import FoundTiles, TileProblem
from ringcore.kernels.linears.skinny_configs import MAX_ROWS, last_of_range
from ringcore.kernels.linears.skinny_tiles import Config
from ringcore.kernels.partials import Partials
from ringcore.model_executor.linear_schemes.kernel_product import Choose, KernelProduct
from ringcore.model_executor.linear_schemes.product import Gate, Product
from ringcore.model_executor.linear_schemes.rounded_product import RoundedProduct
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import Weight

__all__ = [
    "Like",
    "ProductCall",
    "RandomNumbers",
    "Recording",
    "SearchedProduct",
    "SearchedScheme",
    "SearchedTiles",
    "Streams",
    "searched",
]

_EPILOGUES = ("plain", "partial", "after_norm", "added")


class Like(NamedTuple):
    """What a tensor is, without its memory."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        return cls(tensor.shape, tensor.dtype, tensor.device)


class Streams:
    """The residual streams of some calls that are made again, one after the other."""

    def __init__(self, recording: Recording, has_results: bool) -> None:
        """has_results: a product is added to zeros, and reads the numbers of the recording; else the streams are those
        of a step, to which each call adds."""
        self._recording, self._has_results = recording, has_results
        self._residuals: dict[Like, Residual] = {}

    def read(self, like: Like) -> Residual:
        """By a norm."""
        return Residual(self._recording.numbers(like).clone()) if self._has_results else self._of(like)

    def added_to(self, like: Like) -> Residual:
        if not self._has_results:
            return self._of(like)
        return Residual(torch.zeros(like.shape, dtype=like.dtype, device=like.device))

    def _of(self, like: Like) -> Residual:
        if like not in self._residuals:
            self._residuals[like] = Residual(self._recording.stream(like))
        return self._residuals[like]


@dataclass(frozen=True, slots=True)
class ProductCall:
    """A call of a product in a step, which can be made again with other numbers."""

    asked: Mapping[TileProblem, Config | None]  # its problems, and what is chosen without a search
    num_rows: int
    num_bytes: int  # of the weights that are read
    again: Callable[[Streams], torch.Tensor | Residual]


RandomNumbers = Callable[[Like], torch.Tensor]  # see `Recording.numbers`
Again = Callable[[RandomNumbers, Streams], torch.Tensor | Residual]


class Recording:
    """The calls of the products of a model, in the order of steps, and numbers for them."""

    def __init__(self) -> None:
        self.calls: list[ProductCall] = []
        self._asked: dict[TileProblem, Config | None] = {}  # by the call that is made
        self._numbers: dict[Like, torch.Tensor] = {}
        self._streams: dict[Like, torch.Tensor] = {}

    def numbers(self, like: Like) -> torch.Tensor:
        """Random ones, the same for all calls of a shape."""
        if like not in self._numbers:
            generator = torch.Generator(like.device).manual_seed(1)
            rows = torch.randn(like.shape, generator=generator, device=like.device)
            self._numbers[like] = rows.to(like.dtype)
        return self._numbers[like]

    def stream(self, like: Like) -> torch.Tensor:
        """What calls of this shape add to."""
        if like not in self._streams:
            self._streams[like] = self.numbers(like).clone()
        return self._streams[like]

    def ask(self, problem: TileProblem, chosen: Config | None) -> None:
        """A call that is made asks for the tiles of `problem`; chosen: without a search."""
        self._asked[problem] = chosen

    def made(self, num_rows: int, num_bytes: int, again: Again) -> None:
        """Ends a call for so many rows: what makes it again. One that asked for no tiles is none of a search."""
        asked, self._asked = self._asked, {}
        if asked:
            self.calls.append(ProductCall(asked, num_rows, num_bytes, partial(again, self.numbers)))

    def run(self, calls: Sequence[ProductCall]) -> None:
        """Makes these again, as a step does."""
        streams = Streams(self, has_results=False)
        for call in calls:
            call.again(streams)

    def result(self, call: ProductCall) -> torch.Tensor:
        """Of the same numbers, whatever the tiles."""
        found = call.again(Streams(self, has_results=True))
        return found.rows if isinstance(found, Residual) else found


class SearchedTiles:
    """What was found for a model, and while its steps are recorded, their calls."""

    def __init__(self, found: FoundTiles) -> None:
        self.found = found
        self.recording: Recording | None = None

    def choose(self, problem: TileProblem, otherwise: Callable[[], Config | None]) -> Config | None:
        if self.recording is not None:
            self.recording.ask(problem, otherwise())
        return self.found.choose(problem, otherwise)

    def kept(self, known: dict[Any, Config | None], key: Any, choose: Callable[[], Config | None]) -> Config | None:
        """What `choose` gives, from `known` as soon as that cannot change: steps that are launched kernel by kernel ask
        for each product."""
        if key in known:
            return known[key]
        config = choose()
        if self.found.is_frozen:
            known[key] = config
        return config


@dataclass(frozen=True, slots=True)
class SearchedScheme(LinearScheme):
    inner: LinearScheme
    tiles: SearchedTiles = field(compare=False)

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.inner.tensors

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        return self.inner.weights(shard)

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        return searched(self.inner.product(shard, tensors, bias, updatable), self.tiles, num_bytes)


def searched(product: Product, tiles: SearchedTiles | None, num_bytes: int) -> Product:
    """`product` by tiles that were found; one without kernels that have tiles stays as it is. num_bytes: of its
    weight."""
    if tiles is None or not isinstance(product, KernelProduct | RoundedProduct):
        return product
    return SearchedProduct(product, tiles, num_bytes)


class SearchedProduct(Product):
    """The same product for each prologue and epilogue, with tiles of its own."""

    def __init__(self, inner: Any, tiles: SearchedTiles, num_bytes: int) -> None:
        """inner: a `KernelProduct` or `RoundedProduct`. num_bytes: of its weight."""
        self._inner, self._tiles, self._num_bytes = inner, tiles, num_bytes
        self._by_epilogue: dict[str, Product] = {
            epilogue: inner.with_choice(self._searched(epilogue)) for epilogue in _EPILOGUES
        }

    @property
    def unsearched(self) -> Product:
        found: Product = self._inner
        return found

    def _searched(self, epilogue: str) -> Callable[[Choose], Choose]:
        tiles, known = self._tiles, dict[Any, Config | None]()

        def around(choose: Choose) -> Choose:
            def chosen(
                num_outputs: int, num_inputs: int, num_rows: int, *, is_gated: bool = False, **how: Any
            ) -> Config | None:
                if not 0 < num_rows <= MAX_ROWS:
                    return choose(num_outputs, num_inputs, num_rows, is_gated=is_gated, **how)
                otherwise = partial(choose, num_outputs, num_inputs, num_rows, is_gated=is_gated, **how)

                def asked() -> Config | None:
                    problem = self._problem((num_outputs, num_inputs, is_gated), epilogue, num_rows)
                    return tiles.choose(problem, otherwise)

                return tiles.kept(known, (num_rows, is_gated), asked)

            return chosen

        return around

    def _problem(self, shape: tuple[int, int, bool], epilogue: str, num_rows: int) -> TileProblem:
        last = last_of_range(num_rows)
        assert last is not None, num_rows
        kind, storage, numbers = self._inner.stored_as
        return TileProblem(*shape, epilogue, kind, storage, numbers, last)

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        product = self._by_epilogue["plain"]
        made = product(x, tokens, out)
        if self._tiles.recording is not None:
            like = Like.of(x)
            self._record(like, lambda numbers, _: product(numbers(like), NO_TOKEN_CONTEXT))
        return made

    def partial(self, x: torch.Tensor, tokens: TokenContext) -> torch.Tensor:
        product = self._by_epilogue["partial"]
        made = product.partial(x, tokens)
        if self._tiles.recording is not None:
            like = Like.of(x)
            self._record(like, lambda numbers, _: product.partial(numbers(like), NO_TOKEN_CONTEXT))
        return made

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        product = self._by_epilogue["after_norm"]
        made = product.after_norm(norm, hidden, tokens)
        if self._tiles.recording is not None:
            like = Like.of(hidden.rows)
            self._record(like, lambda _, streams: product.after_norm(norm, streams.read(like), NO_TOKEN_CONTEXT))
        return made

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate, tokens: TokenContext) -> torch.Tensor:
        product = self._by_epilogue["after_norm"]
        made = product.gated_after_norm(norm, hidden, gate, tokens)
        if self._tiles.recording is not None:
            like, fused = Like.of(hidden.rows), product.gated_after_norm
            self._record(like, lambda _, streams: fused(norm, streams.read(like), gate, NO_TOKEN_CONTEXT))
        return made

    def add_to(self, hidden: Residual, x: torch.Tensor, tokens: TokenContext) -> None:
        product = self._by_epilogue["added"]
        product.add_to(hidden, x, tokens)
        if self._tiles.recording is None:  # else the add may stay deferred
            return
        of_x, of_rows = Like.of(x), Like.of(hidden.rows)

        def again(numbers: RandomNumbers, streams: Streams) -> Residual:
            stream = streams.added_to(of_rows)
            product.add_to(stream, numbers(of_x), NO_TOKEN_CONTEXT)
            return stream

        self._record(of_x, again)

    def unreduced(self, x: torch.Tensor, tokens: TokenContext) -> Partials:
        product = self._by_epilogue["added"]
        made = product.unreduced(x, tokens)
        if self._tiles.recording is not None:
            of_x, of_rows = Like.of(x), Like(made.rows.shape[1:], torch.float32, x.device)

            def again(numbers: RandomNumbers, streams: Streams) -> Residual:
                stream = streams.added_to(of_rows)
                stream.defer_add(product.unreduced(numbers(of_x), NO_TOKEN_CONTEXT))
                return stream

            self._record(of_x, again)
        return made

    def refresh(self) -> None:
        self._inner.refresh()

    def _record(self, like: Like, again: Again) -> None:
        """After a call for such rows: what makes it again."""
        assert self._tiles.recording is not None
        self._tiles.recording.made(like.shape[0], self._num_bytes, again)
