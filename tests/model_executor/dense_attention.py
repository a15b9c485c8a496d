"""Attention for tests of models: every sequence owns one contiguous run of slots, and each is computed alone.

A block is as long as the longest sequence, so a block table has one column and paging plays no part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.backends.torch_mla import TorchMLABackend
from ringcore.attention.context import ForwardContext, GroupContext, TokenContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.kv_cache.spec import ChunkedAttentionSpec, MLASpec, SlidingWindowSpec


class DenseAttention(AttentionBackend):
    name = "dense"

    @classmethod
    def refusal(cls, spec, layers, device, sharing_specs=()) -> str | None:
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        return (2, num_blocks * self.spec.block_size, self.spec.num_kv_heads, self.spec.head_size)

    def plan(self, metadata: AttentionMetadata) -> object:
        return None

    def forward(self, query, key, value, kv_cache, metadata, plan, layer, sinks=None):
        if not layer.shares_kv:
            kv_cache[0, metadata.slot_mapping] = key
            kv_cache[1, metadata.slot_mapping] = value
        out = torch.empty_like(query)
        for i in range(metadata.num_seqs):
            first, last = metadata.query_start_loc_cpu[i : i + 2]
            length, start = int(metadata.seq_lens_cpu[i]), int(metadata.block_table_cpu[i, 0]) * self.spec.block_size
            repeats = self.num_heads // self.spec.num_kv_heads
            k, v = (cache[start : start + length].float().repeat_interleave(repeats, 1) for cache in kv_cache)
            scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k) * layer.scale
            at = torch.arange(length - (last - first), length, device=query.device)
            ahead = torch.arange(length, device=query.device)[None, None] - at[None, :, None]
            scores.masked_fill_(ahead > 0, float("-inf"))
            if isinstance(self.spec, SlidingWindowSpec):
                scores.masked_fill_(ahead <= -self.spec.sliding_window, float("-inf"))
            if isinstance(self.spec, ChunkedAttentionSpec):
                chunks = torch.arange(length, device=query.device) // self.spec.chunk_size
                scores.masked_fill_(chunks != chunks[at][None, :, None], float("-inf"))
            if sinks is not None:
                assert sinks.shape == query.shape[1:2]
                scores = torch.cat([scores, sinks.float()[:, None, None].expand(-1, len(at), 1)], -1)
            weights = scores.softmax(-1)[..., :length]
            out[first:last] = torch.einsum("hqk,khd->qhd", weights, v).to(out.dtype)
        return out


class DenseRun:
    """A model with its caches: feed it tokens of several sequences and it gives their logits."""

    adapter_of_seq: Sequence[int] | None = None

    def __init__(
        self, model, max_len: int, num_seqs: int, dtype: str = "float32", device: torch.device | None = None
    ) -> None:
        self.model, self.max_len = model, max_len
        layers = model.attention_layers
        specs = [layer.kv_cache_spec(max_len, dtype) for layer in layers]
        groups = list(dict.fromkeys(specs))
        self.group_of_layer = tuple(groups.index(spec) for spec in specs)
        assert [layer.index for layer in layers] == list(range(len(layers))), "others are no places in these tuples"
        kinds = [TorchMLABackend if isinstance(spec, MLASpec) else DenseAttention for spec in groups]
        self.backends = [kind(spec, [layers[0].spec]) for kind, spec in zip(kinds, groups, strict=True)]
        shapes = [self.backends[group].kv_cache_shape(num_seqs) for group in self.group_of_layer]
        self.device = device or model.embed_tokens.table.device
        self.kv_caches = tuple(torch.zeros(one, dtype=getattr(torch, dtype), device=self.device) for one in shapes)
        self.num_computed = [0] * num_seqs

    def step(self, tokens: dict[int, Sequence[int]]) -> torch.Tensor:
        """New tokens by sequence -> logits [all tokens, vocab_size], in the order given."""
        ids, positions, slots, lengths = [], [], [], []
        adapter_ids = []
        for seq, new in tokens.items():
            at = range(self.num_computed[seq], self.num_computed[seq] + len(new))
            ids += new
            positions += at
            slots += [seq * self.max_len + position for position in at]
            self.num_computed[seq] = at.stop
            lengths.append(len(new))
            if self.adapter_of_seq is not None:
                adapter_ids += [self.adapter_of_seq[seq]] * len(new)
        metadata = AttentionMetadata(
            num_tokens=len(ids),
            num_seqs=len(tokens),
            max_query_len=max(lengths),
            max_seq_len=max(self.num_computed[seq] for seq in tokens),
            query_start_loc_cpu=np.cumsum([0, *lengths]).astype(np.int32),
            seq_lens_cpu=np.array([self.num_computed[seq] for seq in tokens], np.int32),
            block_table_cpu=np.array([[seq] for seq in tokens], np.int32),
            slot_mapping=torch.tensor(slots, device=self.device),
        )
        groups = tuple(GroupContext.of(metadata, backend) for backend in self.backends)
        adapted = TokenContext(None if self.adapter_of_seq is None else self._on_device(adapter_ids))
        ctx = ForwardContext(groups, self.group_of_layer, self.kv_caches, adapted)
        with torch.inference_mode():
            hidden = self.model.forward(self._on_device(ids), self._on_device(positions), ctx)
            return self.model.compute_logits(hidden, tokens=adapted).clone()

    def _on_device(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, device=self.device)
