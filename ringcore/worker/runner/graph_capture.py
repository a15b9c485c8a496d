"""What all CUDA graphs of a runner share: their padded sizes and the capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from ringcore.attention.metadata import AttentionMetadata
from ringcore.errors import ConfigError

__all__ = ["capture", "graph_sizes", "mixed_sizes", "padded_metadata"]

_Result = TypeVar("_Result")

# Tokens. Those above 512 waste at most an eighth, since there kernels take longer than launches.
_MIXED_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, *range(576, 960, 64), *range(1024, 1920, 128), 2048)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The padded batch sizes of decoding graphs, ascending: dense where padding costs most."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 32), *range(320, 1025, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def mixed_sizes(max_tokens: int) -> list[int]:
    """The padded token counts of mixed steps (prefill chunks and decodes), ascending."""
    largest = min(_MIXED_SIZES[-1], max_tokens)
    return [size for size in _MIXED_SIZES if size < largest] + [largest]


def capture(
    run: Callable[[], _Result], pool: Any, after_warm_up: Callable[[], object] = lambda: None
) -> tuple[torch.cuda.CUDAGraph, _Result]:
    """A graph of what `run` launches, and its result: tensors that every replay overwrites. after_warm_up: called after
    the warm-up run and before the capture, which executes nothing. Raises `ConfigError` where `run` does what cannot be
    captured."""
    graph = torch.cuda.CUDAGraph()
    capture = torch.cuda.graph(graph, pool=pool)
    # torch's one capture stream. torch keeps a cuBLAS workspace, 32 MiB on an H200, for every stream that ever ran a
    # matrix product: one is enough.
    stream = capture.capture_stream
    assert stream is not None, "torch creates a capture stream"
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm-up run: compiles kernels and initializes libraries, which a capture cannot
        run()
    after_warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with capture:
            result = run()
    except RuntimeError as error:  # it ran just now: what it does cannot be captured
        first = (
            error.__context__ if isinstance(error.__context__, RuntimeError) else error
        )  # the capture's end fails too
        if isinstance(first, torch.OutOfMemoryError):
            raise first from None
        reason = f"{first}".strip().partition("\n")[0]
        raise ConfigError(
            f"enforce_eager=False: this model cannot be captured in CUDA graphs ({reason}); give enforce_eager=True",
            option="enforce_eager",
            value=False,
        ) from first
    return graph, result


def padded_metadata(size: int, slots: torch.Tensor) -> AttentionMetadata:
    """The metadata for planning on the device: the host knows the padded shape only."""
    unknown = np.zeros(0, dtype=np.int32)
    return AttentionMetadata(
        num_tokens=size,
        num_seqs=size,
        max_query_len=1,
        max_seq_len=0,
        query_start_loc_cpu=unknown,
        seq_lens_cpu=unknown,
        block_table_cpu=unknown,
        slot_mapping=slots,
        num_decodes=size,
    )
