"""What stands in for CUDA graphs on a CPU: `replay` does the work again, into the tensors that the capture left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

__all__ = ["Replayed", "capture_at_once", "decode_graphs_on_cpu", "head_graphs_on_cpu"]


class Replayed:
    """In place of a captured graph."""

    def __init__(self, work: Callable[[], Any], result: tuple[torch.Tensor, ...]) -> None:
        self._work, self._result = work, result

    def replay(self) -> None:
        for kept, new in zip(self._result, _as_tuple(self._work()), strict=True):
            kept.copy_(new)

    def pool(self) -> None:
        return None


def captured(
    work: Callable[[], Any], pool: None, after_warm_up: Callable[[], object] = lambda: None
) -> tuple[Replayed, Any]:
    """One warm-up run, as before a capture."""
    result = work()
    after_warm_up()
    kept = tuple(tensor.clone() for tensor in _as_tuple(result))
    return Replayed(work, kept), kept[0] if isinstance(result, torch.Tensor) else kept


def _as_tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result or ())


def capture_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step captures the graph that it misses, as one of a busy engine does in the end."""
    from ringcore.worker.runner import graph_demand

    monkeypatch.setattr(graph_demand, "_MISSES", 1)
    monkeypatch.setattr(graph_demand, "_STEPS_APART", 0)


def decode_graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding steps of GPU runners that are made from now on are `DecodeGraphs`. After `device_runner`."""
    from ringcore.worker.runner import decode_graphs, device_launcher, graph_capture

    monkeypatch.setattr(graph_capture, "capture", captured)
    monkeypatch.setattr(device_launcher, "DecodeStep", decode_graphs.DecodeGraphs)


def head_graphs_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a head are graphs in runners that are made from now on. After `device_runner`."""
    from ringcore.worker.runner import graph_capture, head_graphs, model_runner

    monkeypatch.setattr(graph_capture, "capture", captured)
    monkeypatch.setattr(model_runner, "HeadRuns", head_graphs.HeadGraphs)
