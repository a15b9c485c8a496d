"""What is known of a model before a worker starts, from config.json or a GGUF header.

CommonSpec          what the engine needs to know of any model
├── ModelSpec         with a model class here: every size of its layers, normalized
└── TransformersSpec  run by transformers' class: the configuration as it is, which transformers alone understands
"""

from __future__ import annotations

import msgspec

from ringcore.checkpoint.quantization.rules import Quantization

__all__ = [
    "MAX_SIZES",
    "TEXT_CONFIG",
    "AnySpec",
    "CommonSpec",
    "ExpertsSpec",
    "ModelSpec",
    "RopeSpec",
    "TransformersSpec",
]

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
    "num_experts": 1 << 14,
}

TEXT_CONFIG = "text_config"  # the field of config.json that has the text model's, where there are several parts


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


class ExpertsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mixture of experts that is in the place of an MLP: softmax over all experts, then the largest ones."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts sum to 1
    dense_layers: list[int] = []  # that have an MLP


class CommonSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    architecture: str  # as `architectures` of config.json has it
    vocab_size: int
    num_layers: int
    hidden_size: int
    max_position_embeddings: int
    dtype: str  # of the checkpoint: "float32", "bfloat16" or "float16"
    bos_token_id: int | None
    eos_token_ids: list[int]  # any of them ends a completion
    quantization: Quantization | None = None  # None: every matrix is dense


class ModelSpec(CommonSpec, frozen=True, kw_only=True, tag="native"):
    """A decoder-only transformer of a family in `ringcore.families`, in the units of its checkpoint."""

    intermediate_size: int  # of the MLP
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeSpec
    tie_word_embeddings: bool
    attention_bias: bool  # on q, k and v (and o where `attention_out_bias`)
    attention_out_bias: bool
    mlp_bias: bool
    sliding_windows: dict[int, int] = {}  # layer: window in tokens, the token itself included; absent: full attention
    sliding_rope: RopeSpec | None = None  # of sliding-window layers, where it differs from `rope`
    query_pre_attn_scalar: float | None = None  # scores are divided by its square root; None: by that of head_dim
    experts: ExpertsSpec | None = None  # None: every layer has an MLP
    num_mtp_layers: int = 0  # of multi-token prediction, which change nothing of what the model writes

    @property
    def num_experts(self) -> int:
        """0: it has none."""
        return 0 if self.experts is None else self.experts.num_experts

    def experts_of(self, layer: int) -> ExpertsSpec | None:
        """None where the layer has an MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def few_layers(self) -> ModelSpec:
        """The first layers, enough for one of every kind."""
        kinds = [(self.sliding_windows.get(index), self.experts_of(index) is None) for index in range(self.num_layers)]
        num_layers = 1 + max(kinds.index(kind) for kind in set(kinds))
        windows = {index: window for index, window in self.sliding_windows.items() if index < num_layers}
        return msgspec.structs.replace(self, num_layers=num_layers, sliding_windows=windows)


class TransformersSpec(CommonSpec, frozen=True, kw_only=True, tag="transformers"):
    """A model of a type that transformers has. Its heads, layers and tensors are known once a worker has built it."""

    model_type: str
    config: str  # config.json, or what it would be of a GGUF header, as JSON
    weight_files: list[str]  # safetensors, which may have older names than those that transformers saves
    layers_field: str  # the name of `num_layers` in it
    layer_width: int  # an estimate: the most numbers that a token has at once in a layer, beside the hidden states
    is_part: bool = False  # of a model of several parts, as those that see images are: the text model, which is served
    num_experts: int = 0  # of each mixture, as far as the configuration has it by a name that is known
    expert_size: int = 0  # the intermediate size of an expert, likewise

    def first_layers(self, num_layers: int) -> TransformersSpec:
        """Fields by layer are cut too."""
        whole = msgspec.json.decode(self.config)
        config = whole[TEXT_CONFIG] if self.is_part else whole
        for name, value in config.items():
            if isinstance(value, list) and len(value) == self.num_layers:
                config[name] = value[:num_layers]
            elif isinstance(value, dict) and _is_by_layer(value):
                config[name] = {index: one for index, one in value.items() if int(index) < num_layers}
        config[self.layers_field] = num_layers
        return msgspec.structs.replace(self, num_layers=num_layers, config=msgspec.json.encode(whole).decode())


def _is_by_layer(value: dict[str, object]) -> bool:
    """Whether these are fields of single layers, by their index."""
    return all(index.isdecimal() and isinstance(one, dict) for index, one in value.items())


AnySpec = ModelSpec | TransformersSpec
