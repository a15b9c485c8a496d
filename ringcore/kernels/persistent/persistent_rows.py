"""Two to eight rows through all layers of a dense decoder in 16 bits on Hopper in one launch: a persistent kernel in
CUDA C++ (`persistent_rows.cu`), which shares its ring and its barrier with that of one row (`persistent_layers`).

Products are by tensor cores: the first matrix is eight rows of the weight, the second one the step's rows, of which
each warp has its inputs in registers. A program has contiguous rows of each weight, all warps have parts of each row.

What programs exchange has 16 bits, in blocks of eight inputs of all rows, but for q, k and v. A word that is not
written yet is no number; layers use two sets of words by turns, and each program makes its share of the other set
unwritten while it waits for a barrier. The residual stream stays in float32 in registers of the programs that add to
it; they tell its numbers times the next norm's gains, rounded once, and the sum of squares of their share.

Attention: contexts of all rows and KV heads are one sequence of slots of tokens, of which programs have equal ranges by
lengths that they read on the device, but for ends that are close to a context's. A warp has 16 tokens and up to eight
query heads of a KV head. The program with a context's last part merges all of them by their log-sum-exp.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ringcore.kernels.launch.cuda_kernel import FLOAT, INT, NUMBERS, POINTER, CudaKernel
from ringcore.kernels.linears.skinny_times import NUM_SMS
from ringcore.kernels.persistent.persistent_layers import MAX_LAYERS, NUM_THREADS, Layers, PersistentLayer
from ringcore.kernels.persistent.persistent_rows_tiles import MAX_ROWS, RowsTiles, exchanged_words
from ringcore.kernels.persistent.persistent_tiles import DecoderShape

__all__ = ["HEADERS", "PersistentRows", "persistent_rows"]

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_HERE = Path(__file__)
_SHARED_PARTS = "program", "ring", "context", "warp_attention"
_PARTS = *_SHARED_PARTS, "rows_exchange", "rows_products", "rows_plan", "rows_attention"
HEADERS = NUMBERS, *(_HERE.with_name(f"persistent_{name}.cuh") for name in _PARTS)
persistent_rows = CudaKernel(
    __name__, "persistent_rows", _HERE.with_suffix(".cu"), NUM_THREADS, headers=HEADERS, is_alone=True
)


class PersistentRows:
    """The layers of a decoder, for steps of up to eight rows."""

    MAX_ROWS = MAX_ROWS

    def __init__(
        self,
        shape: DecoderShape,
        tiles: RowsTiles,
        layers: Sequence[PersistentLayer],
        dtype: torch.dtype,
        *,
        eps: float,
        head_eps: float,
        scale: float,
        is_gelu: bool,
    ) -> None:
        """dtype: of weights and the KV cache. eps, head_eps: of the norms of the stream, and of heads. scale: of
        scores."""
        self._shape, self._tiles, self._layers, self._dtype = shape, tiles, layers, dtype
        self._numbers, self._is_gelu = (scale, eps, head_eps), is_gelu
        self._contents: dict[int, str] = {}  # by block size
        device = layers[0].qkv.device
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        words = 2 * exchanged_words(shape, tiles)
        self._exchanged = torch.full((words,), -1, dtype=torch.int32, device=device)

    def __call__(
        self,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
    ) -> None:
        """hidden: [num_rows, hidden_size] float32, the residual stream, which is replaced by that after the last layer;
        NaN if a program has waited for another for a second. cos_sin: [num_rows, head_size], see `HeadRotation`.
        seq_lens: [num_rows] int32, each row's token included; 0: a row without tokens, of which no key is written.
        block_table: [num_rows or more, max_num_blocks] int32. kv_caches: by layer, [num_blocks, 2, num_kv_heads,
        block_size, head_size]; the rows' keys and values are written to them.
        """
        num_rows = len(hidden)
        assert num_rows <= MAX_ROWS
        assert hidden.shape == (num_rows, self._shape.hidden_size), hidden.shape
        assert hidden.dtype == torch.float32, hidden.dtype
        assert hidden.is_contiguous()
        assert cos_sin.is_contiguous()
        block_size = kv_caches[0].shape[3]
        content = self._contents.get(block_size) or self._contents.setdefault(
            block_size, self._specialization(block_size)
        )
        tensors = hidden, cos_sin, seq_lens, block_table, self._counter, self._exchanged

        def arguments() -> list[tuple[Any, Any]]:
            of_layers = [(*_tensors(layer), cache) for layer, cache in zip(self._layers, kv_caches, strict=True)]
            pointers = [[0 if one is None else one.data_ptr() for one in tensors] for tensors in of_layers]
            return [
                (Layers(pointers), None),
                *((tensor.data_ptr(), POINTER) for tensor in tensors),
                *((number, INT) for number in (num_rows, block_table.stride(0), len(pointers))),
                *((number, FLOAT) for number in self._numbers),
            ]

        persistent_rows.launch(NUM_SMS, content, arguments)

    def _specialization(self, block_size: int) -> str:
        shape, tiles, first = self._shape, self._tiles, self._layers[0]
        products = ((of.inputs, of.outputs, of.chunk, of.slot_rows) for of in tiles.products)
        macros = {
            "NUM_PROGRAMS": NUM_SMS,
            "NUM_BARRIERS": 4,
            "MAX_LAYERS": MAX_LAYERS,
            "NUM_HEADS": shape.num_heads,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_SIZE": shape.head_size,
            "BLOCK_SIZE": block_size,
            "HIDDEN": shape.hidden_size,
            "GATED": shape.intermediate_size,
            "GROUP": tiles.group,
            "PRODUCTS": ",".join(f"{{{','.join(map(str, numbers))}}}" for numbers in products),
            "SLOT_BYTES": tiles.slot_bytes,
            "NUM_SLOTS": tiles.num_slots,
            "WINDOW": tiles.window(early=False),
            "EARLY_WINDOW": tiles.window(early=True),
            "KV_WINDOW": tiles.num_slots,
            "SCRATCH_BYTES": tiles.scratch_bytes,
            "SHARED_BYTES": tiles.shared_bytes,
            "EXCHANGED_WORDS": exchanged_words(shape, tiles),
            "WEIGHT_BYTES": 2,
            "TYPE": _TYPES[self._dtype],
            "GAIN_TYPE": _TYPES[first.input_gain.dtype],
            "HEAD_GAIN_TYPE": 0 if first.head_gains is None else _TYPES[first.head_gains.dtype],
            "HAS_HEAD_NORM": int(first.head_gains is not None),
            "HAS_BIAS": int(first.bias is not None),
            "IS_GELU": int(self._is_gelu),
        }
        return json.dumps({"macros": macros, "shared_bytes": tiles.shared_bytes})


def _tensors(layer: PersistentLayer) -> tuple[torch.Tensor | None, ...]:
    """As `Layer` in the kernel has them."""
    weights = layer.qkv, layer.out, layer.gate_up, layer.down
    return *weights, layer.bias, layer.input_gain, layer.mlp_gain, layer.head_gains
