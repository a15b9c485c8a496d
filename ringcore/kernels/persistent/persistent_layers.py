"""One row through all layers of a decoder on Hopper in one launch: a persistent kernel in CUDA C++
(`persistent_layers.cu`).

One program an SM stays for the whole step. One of its threads fills a ring in shared memory with the weights of all
products of all layers, and the keys and values of attention, in their order, by bulk copies: they do not depend on the
row, so memory is busy while programs wait for each other. Eight warps multiply what has landed. A program has whole
rows of the weights, and a thread the same inputs of each, which it keeps in registers; in a small layer a warp has
whole rows.

Programs exchange numbers through the L2 cache: after QKV, each split of attention, their merge, the output projection,
gate and up, and down. A number has a tag in its lowest four bits. What all programs read comes after a barrier over
the grid, which is a counter without a fence: a reader checks the tags, and reads again in the rare case that a store
is late. With a fence, which waits until all stores have arrived behind the weights that are loaded, a layer takes 2 to
3 us more. Queries, keys, values and splits, which few programs read, have no barrier: those read until all have the
tag.

Attention is split over tokens (split-KV): a program has two query heads, or as many as a KV head has if they are odd,
and some tiles of 64 tokens. Where the context is long it has all query heads of a KV head, up to eight, so that keys
are read once, and multiplies by tensor cores. Splits are merged by their log-sum-exp.

In the place of an MLP a layer may have a mixture of experts (`persistent_experts.cuh`). Programs share out the router's
logits, and wait once more; then each chooses the experts, as all do, and the thread that copies waits for this choice.
Gate and up of the chosen experts are one product, and so is down, of which a slot has rows of one expert.

Weights may be codes of FP8 with a scale for each block of 128 x 128, which come behind the rows of a slot; a router
has 16 bits. Each program rounds a row to FP8, by blocks of 128 inputs, when it has read it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ringcore.kernels.launch.cuda_kernel import FLOAT, INT, NUMBERS, POINTER, CudaKernel
from ringcore.kernels.launch.nvrtc import nvrtc_version
from ringcore.kernels.linears.skinny_times import NUM_SMS
from ringcore.kernels.linears.tma_configs import has_wgmma
from ringcore.kernels.persistent.persistent_tiles import DecoderShape, PersistentTiles

__all__ = [
    "MAX_LAYERS",
    "Layers",
    "PersistentLayer",
    "PersistentLayers",
    "persistent_layers",
    "persistent_mixtures",
    "runs_on",
]

_TYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_HERE = Path(__file__)
_PARTS = (
    "program",
    "ring",
    "context",
    "split",
    "heads",
    "attention",
    "warp_attention",
    "long_attention",
    "weights",
    "products",
)
MAX_LAYERS = 128
_HEADERS = (
    NUMBERS,
    *(_HERE.with_name(f"persistent_{name}.cuh") for name in _PARTS),
)
HEADERS = *_HEADERS, _HERE.with_name("persistent_mlp.cuh")
MIXTURE_HEADERS = *_HEADERS, _HERE.with_name("persistent_experts.cuh")
NUM_THREADS = 384  # eight warps that multiply, and four of which one loads weights


class Layers(ctypes.Structure):
    """As in the kernel, or with room left at the end: of each layer its pointers."""

    _fields_ = (("at", ctypes.c_uint64 * (14 * MAX_LAYERS)),)

    def __init__(self, pointers: Sequence[Sequence[int]]) -> None:
        super().__init__(tuple(one for of_layer in pointers for one in of_layer))

    def getPtr(self) -> int:  # noqa: N802 - what cuda-bindings asks for
        return ctypes.addressof(self)


def _kernel(name: str, headers: Sequence[Path]) -> CudaKernel:
    return CudaKernel(__name__, name, _HERE.with_suffix(".cu"), NUM_THREADS, headers=headers, is_alone=True)


persistent_layers = _kernel("persistent_layers", HEADERS)
persistent_mixtures = _kernel("persistent_mixtures", MIXTURE_HEADERS)


@dataclass(frozen=True, slots=True)
class PersistentLayer:
    """The tensors of one layer, contiguous, on one GPU. Linears are of 16 bits, or codes of float8_e4m3fn as uint8."""

    input_gain: torch.Tensor  # [hidden_size]; of the norm before QKV
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_size, hidden_size], pairs of a head interleaved
    bias: torch.Tensor | None  # of qkv
    head_gains: torch.Tensor | None  # [2, head_size]: QK norm
    out: torch.Tensor  # [hidden_size, num_heads * head_size]
    mlp_gain: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate_size, hidden_size]; of a mixture, of each expert: [num_experts, ...]
    down: torch.Tensor  # [hidden_size, intermediate_size]; likewise
    router: torch.Tensor | None = None  # [num_experts, hidden_size], of a mixture
    # Of codes, by linear: [outputs / 128, inputs / 128] float32, of experts one after the other.
    scales: tuple[torch.Tensor, ...] = ()

    @property
    def linears(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """As `Layer` in the kernel has them."""
        weights = *self.linears, self.router, *self.scales, self.bias
        return *weights, self.input_gain, self.mlp_gain, self.head_gains


class PersistentLayers:
    """The layers of a decoder, for steps of one row."""

    def __init__(
        self,
        shape: DecoderShape,
        tiles: PersistentTiles,
        layers: Sequence[PersistentLayer],
        dtype: torch.dtype,
        *,
        eps: float,
        head_eps: float,
        scale: float,
        is_gelu: bool,
        normalises: bool = False,
    ) -> None:
        """dtype: of the KV cache, and of weights that are not codes. eps, head_eps: of the norms of the stream, and of
        heads. scale: of scores. normalises: of a mixture, whether the weights of a token's experts sum to 1."""
        self._shape, self._tiles, self._layers, self._dtype = shape, tiles, layers, dtype
        self._numbers = scale, eps, head_eps
        self._is_gelu, self._normalises = is_gelu, normalises
        self._kernel = persistent_mixtures if shape.num_experts else persistent_layers
        self._contents: dict[int, str] = {}  # by block size
        words = shape.hidden_size + shape.num_gated + shape.num_experts + self._heads
        words += self._heads + 2 * shape.num_kv_heads * shape.head_size
        words += 2 * max(tiles.max_splits, tiles.max_long_splits) * (self._heads + shape.num_heads)
        device = layers[0].qkv.device
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._exchanged = torch.zeros(words, dtype=torch.int32, device=device)

    @property
    def _heads(self) -> int:
        return self._shape.num_heads * self._shape.head_size

    def __call__(
        self,
        hidden: torch.Tensor,
        cos_sin: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
    ) -> None:
        """hidden: [1, hidden_size] float32, the residual stream, which is replaced by that after the last layer; NaN if
        a program has waited for another for a second. cos_sin: [1, head_size], see `HeadRotation`. seq_lens: [1] int32,
        the row's token included. block_table: [1, max_num_blocks] int32. kv_caches: by layer, [num_blocks, 2,
        num_kv_heads, block_size, head_size]; the row's key and value are written to them.
        """
        assert hidden.shape == (1, self._shape.hidden_size), hidden.shape
        assert hidden.dtype == torch.float32, hidden.dtype
        block_size = kv_caches[0].shape[3]
        content = self._contents.get(block_size) or self._contents.setdefault(
            block_size, self._specialization(block_size)
        )
        tensors = hidden, cos_sin, seq_lens, block_table, self._counter, self._exchanged

        def arguments() -> list[tuple[Any, Any]]:
            of_layers = [(*layer.tensors, cache) for layer, cache in zip(self._layers, kv_caches, strict=True)]
            pointers = [[0 if one is None else one.data_ptr() for one in tensors] for tensors in of_layers]
            return [
                (Layers(pointers), None),
                *((tensor.data_ptr(), POINTER) for tensor in tensors),
                (len(pointers), INT),
                *((number, FLOAT) for number in self._numbers),
            ]

        self._kernel.launch(NUM_SMS, content, arguments)

    def _specialization(self, block_size: int) -> str:
        shape, tiles, first = self._shape, self._tiles, self._layers[0]
        products = ((of.inputs, of.outputs, of.parts, of.slot_rows, of.unit_rows) for of in tiles.products)
        macros = {
            "NUM_PROGRAMS": NUM_SMS,
            "NUM_BARRIERS": 6 if shape.num_experts else 5,
            "MAX_LAYERS": MAX_LAYERS,
            "NUM_HEADS": shape.num_heads,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "HEAD_SIZE": shape.head_size,
            "BLOCK_SIZE": block_size,
            "GROUP": tiles.group,
            "MAX_SPLITS": tiles.max_splits,
            "MAX_TILES_OF_ONE": tiles.max_tiles_of_one,
            "LONG_CONTEXT": tiles.long_context,
            "LONG_GROUP": tiles.long_group,
            "MAX_LONG_SPLITS": tiles.max_long_splits,
            "PRODUCTS": ",".join(f"{{{','.join(map(str, numbers))}}}" for numbers in products),
            "SLOT_BYTES": tiles.slot_bytes,
            "NUM_SLOTS": tiles.num_slots,
            "WINDOW": tiles.window(early=False),
            "EARLY_WINDOW": tiles.window(early=True),
            "SCRATCH_BYTES": tiles.scratch_bytes,
            "SHARED_BYTES": tiles.shared_bytes,
            "WEIGHT_BYTES": shape.weight_bytes,
            "TYPE": _TYPES[self._dtype],
            "GAIN_TYPE": _TYPES[first.input_gain.dtype],
            "HEAD_GAIN_TYPE": 0 if first.head_gains is None else _TYPES[first.head_gains.dtype],
            "HAS_HEAD_NORM": int(first.head_gains is not None),
            "HAS_BIAS": int(first.bias is not None),
            "IS_GELU": int(self._is_gelu),
            "IS_BY_WARPS": int(tiles.is_small),
        }
        if shape.num_experts:
            macros["NORMALISES"] = int(self._normalises)
        return json.dumps({"macros": macros, "shared_bytes": tiles.shared_bytes})


def runs_on(device: torch.device) -> bool:
    """Hopper, with as many SMs as there are programs; they all run at once."""
    has_compiler = nvrtc_version() is not None and has_wgmma(device)
    return has_compiler and torch.cuda.get_device_properties(device).multi_processor_count >= NUM_SMS
