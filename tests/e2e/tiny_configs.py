"""A tiny configuration of any type of causal LM, from the type's default one: fewer layers, of every kind that it has,
and smaller sizes."""

from __future__ import annotations

from typing import Any

from ringcore.checkpoint.model_spec import TEXT_CONFIG
from ringcore.errors import ModelLoadError
from ringcore.model_executor.models.transformers.few_layers import few_layers
from ringcore.model_executor.models.transformers.known_types import default_configuration, spec_of

VOCABULARY = 198
_MIN_LAYERS = 3
_MAX_KINDS = 4  # of layers, in a list with an entry a layer

_SIZES: dict[int, list[str]] = {
    VOCABULARY: ["vocab_size", "vocab_size_per_layer_input"],
    256: ["max_position_embeddings", "n_positions", "max_seq_len", "original_max_position_embeddings"],
    96: ["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "dff", "global_intermediate_size"],
    64: ["hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"],
    32: [
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
        "expert_ffn_hidden_size",
    ],
    24: ["q_lora_rank"],
    16: [
        *("head_dim", "v_head_dim", "qk_nope_head_dim", "kv_lora_rank", "hidden_size_per_layer_input"),
        *("swa_head_dim", "swa_v_head_dim", "global_head_dim", "local_attention", "laurel_rank", "index_head_dim"),
        *("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim", "mamba_d_state"),
        "ssm_state_size",
    ],
    8: [
        *("sliding_window", "window_size", "attention_window_size", "attention_chunk_size", "qk_rope_head_dim"),
        *("mamba_n_heads", "mamba_num_heads"),
    ],
    4: [
        *("num_attention_heads", "n_head", "n_heads", "swa_num_attention_heads", "linear_num_value_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "index_topk", "index_n_heads"),
    ],
    2: [
        *("num_key_value_heads", "n_head_kv", "swa_num_key_value_heads", "linear_num_key_heads"),
        *("num_global_key_value_heads", "num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"),
        *("top_k_experts", "moe_top_k"),
    ],
    1: [
        *("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"),
        *("moe_num_shared_experts", "encoder_layers", "mamba_n_groups", "n_groups"),
    ],
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names}
# Strong enough to be seen in the tokens of a tiny model.
_SMALL_NUMBERS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "logit_scale": 0.5}
_PART_SIZES = {
    "num_hidden_layers": 2,
    "num_blocks": 2,
    "image_size": 28,
    "encoder_attention_heads": 4,
    "out_hidden_size": 64,
    **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel", "nemo_conv_channels"), 64),
}
_SHARED_LAYERS = "num_kv_shared_layers"
_SECTIONS = "mrope_section"  # of the pairs of a head: by time, height and width
# Those of a tiny head, for types whose classes have a default of their own for heads of 128.
_SMALL_SECTIONS = [3, 3, 2]
_SECTIONED = (
    *("ernie4_5_vl_moe_text", "glm_ocr_text", "paddleocr_vl_text"),
    *("qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text"),
)
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """Without weights' dtype and the like: what is not a size is as it is by default. Raises `ModelLoadError`."""
    config = default_configuration(model_type)
    num_layers = _num_layers(config)
    if TEXT_CONFIG in config:
        parts = {name: _small_part(value) for name, value in config.items() if _is_part(value)}
        if "adaptor_config" in parts:  # its width is a quarter of the model's
            parts["adaptor_config"]["intermediate_size"] = _SMALL["hidden_size"] // 4
        tokens = {name: token for name, token in _TOKENS.items() if name in config}
        return config | parts | {TEXT_CONFIG: _tiny(config[TEXT_CONFIG], num_layers)} | tokens | changes
    return _tiny(config, num_layers) | changes


def _num_layers(config: dict[str, Any]) -> int | None:
    """As many as have one of each kind; None of a model that does not begin with them, or that is refused."""
    try:
        spec = spec_of(config)
    except ModelLoadError:
        return None
    num_layers = few_layers(spec).num_layers
    return None if num_layers == spec.num_layers else max(num_layers, _MIN_LAYERS)


def _tiny(config: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    config = _cut(config, num_layers)
    sizes = _small(config)
    if _is_number(config.get("kv_lora_rank")):  # latent attention has keys and values for every head
        sizes["num_key_value_heads"] = _SMALL["num_attention_heads"]
    if "head_dim" in sizes and config["head_dim"] == config.get("qk_rope_head_dim"):  # the part that is rotated
        sizes["head_dim"] = _SMALL["qk_rope_head_dim"]
    if _SECTIONS in (rope := config.get("rope_parameters") or {}):
        head_size = sizes.get("head_dim", _SMALL["hidden_size"] // _SMALL["num_attention_heads"])
        pairs = int(head_size * rope.get("partial_rotary_factor", 1)) // 2
        sections = [size * pairs // sum(rope[_SECTIONS]) for size in rope[_SECTIONS]]
        sections[0] += pairs - sum(sections)
        config = config | {"rope_parameters": rope | {_SECTIONS: sections}}
    if config.get("model_type") in _SECTIONED:
        config = config | {"rope_parameters": rope | {_SECTIONS: _SMALL_SECTIONS}}
    if config.get(_SHARED_LAYERS):  # the last ones, of kinds that are among the first
        sizes[_SHARED_LAYERS] = min(config[_SHARED_LAYERS], config["num_hidden_layers"] // 2)
    numbers = {name: value for name, value in _SMALL_NUMBERS.items() if _is_number(config.get(name))}
    tokens = {name: token for name, token in _TOKENS.items() if name in config}
    return config | sizes | numbers | tokens


def _cut(config: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    """The first layers; None: as many as its lists have an entry of each kind for. A configuration that is refused as
    it is stays whole."""
    try:
        spec = spec_of(config)
    except ModelLoadError:
        return config
    by_layer = {
        name: value for name, value in config.items() if isinstance(value, list) and len(value) == spec.num_layers
    }
    num_layers = num_layers or max(_MIN_LAYERS, *map(_num_for_all_kinds, by_layer.values()), 0)
    num_layers = min(spec.num_layers, num_layers)
    cut: dict[str, Any] = {name: value[:num_layers] for name, value in by_layer.items()}
    for name, value in config.items():  # by the index of a layer
        if isinstance(value, dict) and all(key.isdecimal() and isinstance(one, dict) for key, one in value.items()):
            cut[name] = {key: _small(one) for key, one in value.items() if int(key) < num_layers}
        elif _is_part(value):
            cut[name] = _small_part(value)
    return config | cut | {spec.layers_field: num_layers}


def _small(config: dict[str, Any]) -> dict[str, Any]:
    by_layer = {name: [_SMALL[name]] * len(value) for name, value in config.items() if _is_sizes(name, value)}
    return by_layer | {name: size for name, size in _SMALL.items() if _is_number(config.get(name))}


def _is_sizes(name: str, value: object) -> bool:
    return name in _SMALL and isinstance(value, list) and all(map(_is_number, value))


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and "model_type" in value


def _small_part(config: dict[str, Any]) -> dict[str, Any]:
    """Of another part, which takes no part in text."""
    sizes = {name: size for name, size in _PART_SIZES.items() if name in config}
    lists = {name: value for name, value in config.items() if isinstance(value, list)}
    by_layer = {name: value[:2] for name, value in lists.items() if len(value) == config.get("num_hidden_layers")}
    return config | _small(config) | sizes | by_layer


def _num_for_all_kinds(by_layer: list[Any]) -> int:
    kinds = [str(kind) for kind in by_layer]
    return 0 if len(set(kinds)) > _MAX_KINDS else 1 + max(kinds.index(kind) for kind in kinds)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
