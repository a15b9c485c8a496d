"""Reads a `ModelSpec` from the metadata and the tensor names of a GGUF file."""

from __future__ import annotations

from ringcore.checkpoint.family import Families, GGUFFormat
from ringcore.checkpoint.gguf_fields import (
    read_gguf_dtype,
    read_gguf_eos_token_ids,
    read_gguf_token_id,
    read_gguf_vocab_size,
    shortest,
)
from ringcore.checkpoint.gguf_header import read_gguf_header
from ringcore.checkpoint.gguf_rope import read_gguf_rope
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.model_spec import MAX_SIZES, ModelSpec

__all__ = ["read_gguf_spec"]


def read_gguf_spec(path: str, families: Families) -> ModelSpec:
    """The facts of the model in a GGUF file. Raises `ModelLoadError` as `read_model_spec` does."""
    header = read_gguf_header(path)
    meta = Metadata(header.metadata, path)
    stored, family = families.of_gguf(meta)
    name = stored.name
    _refuse_unsupported(meta, stored)

    def size(key: str, field: str, default: int | None = None) -> int:
        return meta.integer(f"{name}.{key}", default, high=MAX_SIZES[field])

    hidden_size = size("embedding_length", "hidden_size")
    num_heads = size("attention.head_count", "num_heads")
    head_dim = _head_dim(meta, name, hidden_size, num_heads)
    num_layers = size("block_count", "num_layers")
    attention = {} if stored.attention is None else stored.attention(meta, num_layers, hidden_size // num_heads)
    return ModelSpec(
        architecture=family.architectures[0],
        vocab_size=read_gguf_vocab_size(header),
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length", "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", "num_kv_heads", num_heads),
        head_dim=head_dim,
        rms_norm_eps=shortest(meta.number(f"{name}.attention.layer_norm_rms_epsilon")),
        max_position_embeddings=size("context_length", "max_position_embeddings"),
        rope=read_gguf_rope(header, meta, name, head_dim),
        tie_word_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        attention_out_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_up.bias" in header.tensors,
        dtype=read_gguf_dtype(header),
        bos_token_id=read_gguf_token_id(meta, "bos_token_id"),
        eos_token_ids=read_gguf_eos_token_ids(meta),
        **attention,
    )


def _refuse_unsupported(meta: Metadata, stored: GGUFFormat) -> None:
    name = stored.name
    if meta.get(f"{name}.expert_count"):
        raise meta.error(f"{name}.expert_count", f"is {meta.get(f'{name}.expert_count')}; experts are not computed")
    if stored.attention is None and meta.get(f"{name}.attention.sliding_window"):
        raise meta.error(f"{name}.attention.sliding_window", f"is present; the models of {name} have no sliding window")
    for key in (f"{name}.attn_logit_softcapping", f"{name}.final_logit_softcapping"):
        if meta.get(key):
            raise meta.error(key, f"is {meta.get(key)}; capped logits are not computed")


def _head_dim(meta: Metadata, name: str, hidden_size: int, num_heads: int) -> int:
    if f"{name}.attention.key_length" not in meta and hidden_size % num_heads:
        raise meta.error(f"{name}.attention.head_count", f"is {num_heads}, which does not divide {hidden_size}")
    head_dim = meta.integer(f"{name}.attention.key_length", hidden_size // num_heads, high=MAX_SIZES["head_dim"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if meta.integer(f"{name}.{key}", head_dim) != head_dim:
            raise meta.error(f"{name}.{key}", f"is {meta.get(f'{name}.{key}')}; only the head size {head_dim} is known")
    return head_dim
