"""Rotary position embedding (RoPE): the angles of every kind, and the interleaved layout in which they are cheap to
apply.

A checkpoint pairs entry i of a head with entry i + head_dim / 2. Here q and k come out of their projection with the
pairs interleaved, 2i and 2i + 1: the rows of the weight are loaded in that order (`interleaved`), and the rotation of a
pair is then one complex product. Scores do not change, since q and k are permuted alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from ringcore.attention.layer import KVWriteTarget
from ringcore.checkpoint import RopeSpec
from ringcore.kernels.attention.head_rotation import HeadRotation
from ringcore.kernels.native.row_kernels import RowKernels
from ringcore.model_executor import ops
from ringcore.model_executor.layers.norm import HeadNorm, RMSNorm

__all__ = [
    "ComplexRotation",
    "CpuRotation",
    "KernelRotation",
    "RotaryEmbedding",
    "RotaryTable",
    "Rotation",
    "interleaved",
    "inverse_frequencies",
]


def interleaved(head_dim: int, rotary_dim: int | None = None) -> torch.Tensor:
    """[head_dim] int64: entry j of a head here is entry interleaved[j] of it in a checkpoint. rotary_dim: leading
    entries that are rotated; None: all."""
    entries = torch.arange(head_dim)
    size = head_dim if rotary_dim is None else rotary_dim
    return torch.cat((entries[:size].view(2, size // 2).t().flatten(), entries[size:]))


# q [n, heads, head_dim], k and v [n, kv_heads, head_dim]; None if keys and values are in the KV cache already.
Heads = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Rotation(Protocol):
    """The rotation of a step's tokens, in the form for the device; shared by many layers."""

    def __call__(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_norm: HeadNorm | None,
        kv_target: KVWriteTarget | None = None,
    ) -> Heads:
        """qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], contiguous; overwritten. kv_target: where keys and
        values may be written by the same kernel.

        -> q and k, normalised if the model has a QK norm, and rotated, and v. They may be strided views. k and v are
        None if they were written to kv_target.
        """

    def of_heads(self, head_norm: HeadNorm | None) -> HeadRotation | None:
        """The same for attention that rotates itself; None: on this device none does."""

    def rotate(self, x: torch.Tensor) -> None:
        """Rotates x in place: [n, heads, head_dim], of any strides but the last, which is 1, and even."""

    def latent_rows(
        self, compressed: torch.Tensor, norm: RMSNorm, kv_target: KVWriteTarget | None = None
    ) -> torch.Tensor:
        """compressed: [n, size of the norm + head_dim], of any row stride -> the first part normalised and the second
        one rotated, a new tensor; in kv_target too, where there is one."""


@dataclass(frozen=True, slots=True)
class ComplexRotation:
    """In plain torch: one complex product."""

    angles: torch.Tensor  # [n, 1, head_dim / 2] complex64, for `ops.apply_rotary`

    def __call__(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_norm: HeadNorm | None,
        kv_target: KVWriteTarget | None = None,
    ) -> Heads:
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
        qk, v = torch.split_with_sizes(heads, (num_heads + num_kv_heads, num_kv_heads), 1)
        if head_norm is not None:
            qk = head_norm(qk)
        ops.apply_rotary(qk, self.angles)
        q, k = torch.split_with_sizes(qk, (num_heads, num_kv_heads), 1)
        return q, k, v

    def of_heads(self, head_norm: HeadNorm | None) -> HeadRotation | None:
        return None

    def rotate(self, x: torch.Tensor) -> None:
        ops.apply_rotary(x, self.angles)

    def latent_rows(
        self, compressed: torch.Tensor, norm: RMSNorm, kv_target: KVWriteTarget | None = None
    ) -> torch.Tensor:
        assert kv_target is None, "backends on this device write rows"
        rank = compressed.shape[1] - 2 * self.angles.shape[2]
        rows = torch.cat((norm(compressed[:, :rank]), compressed[:, rank:]), 1)
        ops.apply_rotary(rows[:, None, rank:], self.angles)
        return rows


@dataclass(frozen=True, slots=True)
class CpuRotation(ComplexRotation):
    """By one call of a C kernel, in place: QK norm and rotation."""

    kernels: RowKernels

    def __call__(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_norm: HeadNorm | None,
        kv_target: KVWriteTarget | None = None,
    ) -> Heads:
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
        norm = () if head_norm is None else (head_norm.float_gain, head_norm.eps)
        self.kernels.rotate(heads, self.angles, num_heads, num_kv_heads, *norm)
        q, k, v = torch.split_with_sizes(heads, (num_heads, num_kv_heads, num_kv_heads), 1)
        return q, k, v


@dataclass(frozen=True, slots=True)
class KernelRotation:
    """By one fused kernel, in place: QK norm, rotation and KV cache write."""

    cos_sin: torch.Tensor  # [n, head_dim] float32, by token, as `qk_norm_rope` takes it

    def __call__(
        self,
        qkv: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        head_norm: HeadNorm | None,
        kv_target: KVWriteTarget | None = None,
    ) -> Heads:
        from ringcore.kernels.attention.qk_norm_rope import qk_norm_rope

        _, gain, eps = self.of_heads(head_norm)
        kv_cache, slots = (None, None) if kv_target is None else kv_target
        qk_norm_rope(
            *(qkv, None, self.cos_sin, num_heads, num_kv_heads),
            norm_weight=gain,
            eps=eps,
            kv_cache=kv_cache,
            slot_mapping=slots,
        )
        heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, -1)
        if kv_target is not None:
            return heads[:, :num_heads], None, None
        q, k, v = torch.split_with_sizes(heads, (num_heads, num_kv_heads, num_kv_heads), 1)
        return q, k, v

    def of_heads(self, head_norm: HeadNorm | None) -> HeadRotation:
        return HeadRotation(self.cos_sin, *((None, 0.0) if head_norm is None else (head_norm.gain, head_norm.eps)))

    def rotate(self, x: torch.Tensor) -> None:
        from ringcore.kernels.attention.latent_rows import rotate_heads

        rotate_heads(x, self.cos_sin)

    def latent_rows(
        self, compressed: torch.Tensor, norm: RMSNorm, kv_target: KVWriteTarget | None = None
    ) -> torch.Tensor:
        from ringcore.kernels.attention.latent_rows import latent_rows

        return latent_rows(compressed, norm.gain, norm.eps, self.cos_sin, *(kv_target or ()))


class RotaryTable:
    """The angle of every pair at every position, gathered once per step for all layers."""

    def __init__(self) -> None:
        self._at: Callable[[torch.Tensor], Rotation]

    def bind_table(self, table: torch.Tensor, device: torch.device) -> None:
        """table: [positions, head_dim / 2] complex64, on the CPU."""
        if ops.has_kernels(device):
            cos_sin = torch.view_as_real(table).flatten(1).to(device)
            self._at = lambda positions: KernelRotation(ops.gather_rows(cos_sin, positions, is_dependent=True))
        else:
            by_head = table.unsqueeze(1).to(device)
            kernels = ops.cpu_kernels(device)
            self._at = lambda positions: (
                ComplexRotation(by_head.index_select(0, positions))
                if kernels is None
                else CpuRotation(by_head.index_select(0, positions), kernels)
            )

    def __call__(self, positions: torch.Tensor) -> Rotation:
        """positions: [n] int64, below the table's length."""
        return self._at(positions)


class RotaryEmbedding(RotaryTable):
    """The angles of a kind of rotary embedding, at positions below `max_model_len`."""

    def __init__(self, head_dim: int, rope: RopeSpec, max_model_len: int) -> None:
        super().__init__()
        assert head_dim % 2 == 0, head_dim
        self._head_dim = head_dim
        self._rope = rope
        self._max_model_len = max_model_len

    def bind(self, device: torch.device) -> None:
        """Computes the table in float32, as transformers does."""
        frequencies, factor = inverse_frequencies(self._head_dim, self._rope)
        angles = torch.arange(self._max_model_len, dtype=torch.float32)[:, None] * frequencies
        self.bind_table(torch.complex(angles.cos(), angles.sin()).mul_(factor), device)


def inverse_frequencies(head_dim: int, rope: RopeSpec) -> tuple[torch.Tensor, float]:
    """([head_dim / 2] float32 radians per position, the factor on q and k) of a kind of rotary embedding.

    The formulas and their order of operations are those of transformers: a last bit here is multiplied by a position.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    match rope.kind:
        case "default":
            return frequencies, 1.0
        case "linear":
            return frequencies / _given(rope.factor), 1.0
        case "llama3":
            return _llama3(frequencies, rope), 1.0
        case "yarn":
            return _yarn(frequencies, head_dim, rope), _yarn_factor(rope)
    raise AssertionError(f"rope kind {rope.kind!r} passed the config reader")


def _llama3(frequencies: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    factor, low, high = _given(rope.factor), _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    context = _given(rope.original_max_position_embeddings)
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / factor, blended)
    return torch.where(wavelengths < context / high, frequencies, stretched)


def _yarn(frequencies: torch.Tensor, head_dim: int, rope: RopeSpec) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): a linear ramp over the pairs, from kept to stretched by `factor`."""
    factor, context = _given(rope.factor), _given(rope.original_max_position_embeddings)

    def pair_with(turns: float) -> float:
        """The pair, as a real number, that makes `turns` rotations within the original context."""
        return (head_dim * math.log(context / (turns * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = pair_with(_given(rope.beta_fast)), pair_with(_given(rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as transformers does: the ramp is a step, and no division by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    stretched = 1.0 / (factor * rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    return stretched * ramp + frequencies * (1 - ramp)


def _yarn_factor(rope: RopeSpec) -> float:
    """The factor that preserves the attention temperature: given, or from `factor` as in the paper, or from the two
    mscales."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(mscale: float) -> float:
        factor = _given(rope.factor)
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


def _given(value: float | None) -> float:
    """A field that the kind requires and the config reader has checked."""
    assert value is not None
    return value
