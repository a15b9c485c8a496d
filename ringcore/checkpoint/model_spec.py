"""The architecture parameters of a model, normalized from config.json or a GGUF header."""

from __future__ import annotations

import msgspec

__all__ = ["MAX_SIZES", "ModelSpec", "RopeSpec"]

# By field of `ModelSpec`: several times those of any published model. A file that claims more is broken; the limits
# bound loops and tables such as the names of all layers or the permutation of a head's rows.
MAX_SIZES = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_layers": 1000,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 27,
}


class RopeSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rotary embedding. `kind` is "default", "linear", "llama3" or "yarn"; a field that a kind ignores stays None."""

    theta: float
    kind: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn
    beta_slow: float | None = None  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A dense decoder-only transformer, in the units of its checkpoint."""

    architecture: str  # of a family in ringcore.families
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v (and o where `attention_out_bias`)
    attention_out_bias: bool
    mlp_bias: bool
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"
    bos_token_id: int | None
    eos_token_ids: list[int]  # any of them ends a completion
    sliding_windows: dict[int, int] = {}  # layer: window in tokens, the token itself included; absent: full attention
    sliding_rope: RopeSpec | None = None  # of sliding-window layers, where it differs from `rope`
    query_pre_attn_scalar: float | None = None  # scores are divided by its square root; None: by that of head_dim
