"""Which layers each stage of a pipeline has: so that the largest stage has as few bytes of weights as can be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from ringcore.distributed.parallel import Stage
from ringcore.model_executor.weight import Weight

__all__ = ["layers_of", "split_layers", "total_bytes"]


def total_bytes(weights: Iterable[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)


def layers_of(stage: Stage, layers: Sequence[int], before: int, after: int) -> range:
    """layers: the bytes of each; before, after: those of what the first and the last stage have besides."""
    return range(len(layers)) if stage.has_all_layers else split_layers(layers, before, after, stage.size)[stage.index]


def split_layers(layers: Sequence[int], before: int, after: int, num_stages: int) -> list[range]:
    """The layers of each stage, at least one. Of splits with the same largest stage, the one whose first stages are
    larger."""
    assert 1 <= num_stages <= len(layers), (num_stages, len(layers))
    sums = [0, *accumulate(layers)]

    def num_bytes(begin: int, end: int) -> int:
        ends = (before if begin == 0 else 0) + (after if end == len(layers) else 0)
        return sums[end] - sums[begin] + ends

    # best[k][begin]: of k stages with the layers from `begin` on, the bytes of the largest, and where the first ends.
    best = [{begin: (num_bytes(begin, len(layers)), len(layers)) for begin in range(len(layers))}]
    for k in range(2, num_stages + 1):
        rest, found = best[-1], {}
        for begin in range(len(layers) - k + 1):
            ends = range(len(layers) - k + 1, begin, -1)
            found[begin] = min(
                ((max(num_bytes(begin, end), rest[end][0]), end) for end in ends), key=lambda one: one[0]
            )
        best.append(found)
    stages, begin = [], 0
    for table in reversed(best):
        end = table[begin][1]
        stages.append(range(begin, end))
        begin = end
    return stages
