"""The interface between a model's attention layers and the code that computes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch

from ringcore.attention.metadata import AttentionMetadata
from ringcore.attention.spec import AttentionSpec
from ringcore.kernels.attention.head_rotation import HeadRotation
from ringcore.kernels.dtypes import TORCH_DTYPES
from ringcore.kv_cache.spec import HeadsSpec, KVCacheSpec, MLASpec

__all__ = ["AttentionBackend", "LatentBackend", "LatentUpProjection", "PagedBackend", "SingleTokens"]

_NEVER = 1 << 60  # tokens


class PagedBackend(ABC):
    """Paged attention for the layers of a KV cache group: they share a KVCacheSpec, and each has its AttentionSpec.
    Per-step state is in `plan`'s result, not here."""

    name: ClassVar[str]
    # Whether the layer writes what a step's tokens store to their slots, by a kernel of its own, before `forward`.
    accepts_prewritten_kv: ClassVar[bool] = False
    # Whether a token's output has the same bits alone, in any batch, in a prompt, a chunk or a decode.
    is_batch_invariant: ClassVar[bool] = False

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        """layers: each different one of the group; all have the same number of query heads, a multiple of
        `spec.num_kv_heads`. `forward` is called for these alone, and for those that only differ in `shares_kv`.

        sharing_specs: the specs of other layers whose blocks share the same memory; their pages have the same size in
        bytes. The layout must map block b to the same bytes, and to no others, in each of their shapes.
        """
        self.spec = spec
        (self.num_heads,) = {layer.num_heads for layer in layers}

    @classmethod
    @abstractmethod
    def refusal(
        cls,
        spec: KVCacheSpec,
        layers: Sequence[AttentionSpec],
        device: torch.device,
        sharing_specs: Sequence[KVCacheSpec] = (),
    ) -> str | None:
        """Why this backend cannot serve these layers on `device`; None if it can. Arguments: as for the constructor."""

    @property
    def storage_dtype(self) -> torch.dtype:
        """Of a layer's cache tensor: the model's, or bytes."""
        return torch.uint8 if self.spec.is_fp8 else TORCH_DTYPES[self.spec.dtype]

    @abstractmethod
    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """The shape of one layer's cache tensor; its bytes are num_blocks * spec.page_size_bytes."""

    def block_views(self, kv_cache: torch.Tensor) -> Sequence[torch.Tensor]:
        """Views [num_blocks, ...] of a layer's cache that together have the bytes of every block. By default the cache
        itself, for layouts with the blocks first."""
        return (kv_cache,)

    def warm_up(self, num_tokens: int, max_len: int, device: torch.device) -> None:  # noqa: B027  most need nothing
        """Loads libraries and compiles what prompts of up to `max_len` tokens need, in steps of up to `num_tokens`.

        May be called on another thread. Optional: without it the first such step does the same.
        """

    @abstractmethod
    def plan(self, metadata: AttentionMetadata) -> object:
        """Per-step data that all layers share. Valid until the next call to `plan`."""

    def plan_on_device(
        self,
        seq_lens: torch.Tensor,  # [num_seqs] int32
        block_table: torch.Tensor,  # [num_seqs, max_num_blocks] int32
        *,
        one_token_each: bool = False,
    ) -> object | None:
        """`plan` for one token per sequence, from lengths that only the device knows, and that a CUDA graph reads again
        in every replay. An empty sequence, at any index, is padding or a stopped row: `forward` may leave its output
        row unwritten, and gives the other rows the same results as without it. one_token_each: no two sequences are of
        one request, so all tokens but the last of each were written before the step. None: the backend needs the
        lengths on the host.
        """
        return None

    def plan_mixed_on_device(
        self,
        query_start_loc: torch.Tensor,  # [num_seqs + 1] int32
        seq_lens: torch.Tensor,  # [num_seqs] int32
        block_table: torch.Tensor,  # [num_seqs, max_num_blocks] int32
        decode_seq_lens: torch.Tensor,  # [any number up to num_seqs] int32
        num_tokens: int,
    ) -> object | None:
        """`plan_on_device` for a mixed step of `num_tokens` tokens, padding included, with any number of tokens per
        sequence.

        Decodes come first: sequence i has token i, and decode_seq_lens[i] tokens of context. decode_seq_lens is 0 for
        all others. The others own the tokens query_start_loc[i] to query_start_loc[i + 1]; in query_start_loc the
        decodes are empty: with d of them its first d + 1 entries are d. A padding sequence is empty in both, so the
        last entry is the number of the step's real tokens. `forward` leaves the output rows of tokens outside all
        sequences unwritten. None: the backend needs the lengths on the host.
        """
        return None

    def has_host_kernels(self, metadata: AttentionMetadata) -> bool:
        """Whether `plan` takes kernels for this step that `plan_mixed_on_device` cannot have, and that are faster than
        a graph without them."""
        return False


class AttentionBackend(PagedBackend):
    """Of heads: of every token the keys and values of each KV head are cached.

    With `accepts_prewritten_kv` the cache of a layer whose values are as wide as its keys is [num_blocks, 2,
    num_kv_heads, block_size, head_size], keys then values, and `forward` accepts key=None and value=None.
    """

    spec: HeadsSpec

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        assert not isinstance(spec, MLASpec), "the backend refuses latents"
        super().__init__(spec, layers, sharing_specs)

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_size]
        key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_size]
        value: torch.Tensor | None,  # [num_tokens, num_kv_heads, v_head_size]
        kv_cache: torch.Tensor,  # of kv_cache_shape
        metadata: AttentionMetadata,
        plan: object,
        layer: AttentionSpec,
        sinks: torch.Tensor | None = None,  # [num_heads], contiguous, in any float dtype; if layer.has_sinks
    ) -> torch.Tensor:  # [num_tokens, num_heads, v_head_size]
        """Writes keys and values to their slots, then attends causally: over each sequence's whole context, its sliding
        window, or its chunk. If both are None they are in their slots already. So are those of a layer with
        `shares_kv`, which is given them all the same.

        Slots of the null block (block 0) are written like any other; what is read from them is masked.
        """

    def rotates(self, plan: object) -> bool:
        """Whether `forward_unrotated` serves this step's layers, whose values are as wide as their keys."""
        return False

    def forward_unrotated(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_size]
        rotation: HeadRotation,
        kv_cache: torch.Tensor,
        plan: object,
        layer: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`forward` of the output of a QKV projection: QK norm, rotary embedding and the KV write are part of it."""
        raise AssertionError(f"{self.name} rotates nothing")

    def single_tokens(self, plan: object) -> SingleTokens | None:
        """Of a step of decoding sequences with one token each, where another kernel may attend in place of `forward`
        and write the tokens' keys and values; None: not of this step, or nowhere."""
        return None


class SingleTokens(NamedTuple):
    """Decoding sequences with one token each, on the device."""

    seq_lens: torch.Tensor  # [num_seqs] int32, the step's token included; 0: a padding row
    block_table: torch.Tensor  # [num_seqs or more, max_num_blocks] int32


class LatentUpProjection(Protocol):
    """How the keys and values of this rank's heads follow from latents: the weights of one layer."""

    qk_nope_head_dim: int
    v_head_dim: int

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """The part of queries that is not rotated, [num_tokens, num_heads, qk_nope_head_dim], through each head's keys
        -> [num_tokens, num_heads, kv_lora_rank]: their product with a latent is that with the head's key."""

    def values(self, latents: torch.Tensor) -> torch.Tensor:
        """Weighted sums of latents, [num_tokens, num_heads, kv_lora_rank] -> those of each head's values: [num_tokens,
        num_heads, v_head_dim]."""

    def expanded(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, kv_lora_rank] -> of some heads the keys without their rotated part, [n, heads, qk_nope_head_dim], and the
        values, [n, heads, v_head_dim]."""


class LatentBackend(PagedBackend):
    """Of latents. The cache of a layer is [num_blocks, block_size, kv_lora_rank + qk_rope_head_dim], a row a token.

    With queries that are absorbed through the keys a row serves all heads as key, and its latent as value: what is
    computed for a cached token is most, and what is read of it least. With heads that are expanded from the rows it is
    the other way about. Both are the same sums in another order.
    """

    spec: MLASpec

    def __init__(
        self, spec: KVCacheSpec, layers: Sequence[AttentionSpec], sharing_specs: Sequence[KVCacheSpec] = ()
    ) -> None:
        assert isinstance(spec, MLASpec), "the backend refuses other caches"
        super().__init__(spec, layers, sharing_specs)

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (num_blocks, self.spec.block_size, self.spec.head_size)

    def write(self, rows: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """rows: [num_tokens, kv_lora_rank + qk_rope_head_dim]. Not called for rows that are written already."""
        if rows.dtype == torch.float16:  # a finite hidden state may have overflowed: see `torch_sdpa`
            rows = torch.nan_to_num(rows)
        kv_cache.flatten(0, 1).index_copy_(0, slot_mapping, rows)

    def expands_from(self, up: LatentUpProjection) -> int:
        """The fewest new tokens of a sequence for which less is computed with expanded heads.

        For a head and a token before them that is kv_lora_rank * (qk_nope_head_dim + v_head_dim) products once, and per
        new token the key and the value; with absorbed queries the row and its latent per new token alone.
        """
        rank, both = self.spec.kv_lora_rank, up.qk_nope_head_dim + up.v_head_dim
        saved = 2 * rank - both  # per new token: the rotated part is in both
        return rank * both // saved + 1 if saved > 0 else _NEVER

    @abstractmethod
    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]
        rows: torch.Tensor,  # [num_tokens, kv_lora_rank + qk_rope_head_dim], which are in their slots too
        up: LatentUpProjection,
        kv_cache: torch.Tensor,  # of kv_cache_shape
        metadata: AttentionMetadata,
        plan: object,
        layer: AttentionSpec,
    ) -> torch.Tensor:  # [num_tokens, num_heads, v_head_dim]
        """Attends causally over each sequence's whole context."""
