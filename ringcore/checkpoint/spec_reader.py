"""Reads a `ModelSpec` from a model's files: from config.json here, from a GGUF header in `gguf_spec`."""

from __future__ import annotations

from pathlib import Path

from ringcore.checkpoint.family import Activation, BiasRule, Families, Family
from ringcore.checkpoint.gguf_spec import read_gguf_spec
from ringcore.checkpoint.metadata import Metadata, read_json
from ringcore.checkpoint.model_file import path_exists
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.model_spec import MAX_SIZES, ModelSpec
from ringcore.checkpoint.safetensors_header import TensorIndex
from ringcore.checkpoint.sliding_windows import read_windows
from ringcore.errors import ModelLoadError

__all__ = ["read_model_spec"]

_DTYPES = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
}
# The names that config.json has for an activation.
_ACTIVATION_NAMES: dict[Activation, tuple[str, ...]] = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}


def read_model_spec(files: ModelFiles, families: Families) -> ModelSpec:
    """The model's spec.

    Raises `ModelLoadError` for an architecture without a family, a missing or invalid field (naming it and the file),
    and for what the model classes do not implement: sliding windows where the architecture has none,
    partial rotary embeddings, quantized safetensors, capped logits, another activation than the architecture's.
    """
    if files.config_path is None:
        spec = read_gguf_spec(files.path, families)
        source = files.path
    else:
        spec = _from_config(files, families)
        source = files.config_path
    _check_sizes(spec, source)
    return spec


def _family(config: Metadata, families: Families) -> tuple[str, Family]:
    """(its name in `architectures`, the family)."""
    names = config.required("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        raise config.error("architectures", f"is {names!r}, a list of one name is needed")
    if (found := families.native(names)) is not None:
        return found
    known = ", ".join(sorted(families.architectures))
    raise ModelLoadError(
        f"{config.path}: the architecture {names[0]!r} is not known; known: {known}",
        path=config.path,
        architecture=names[0],
    )


def _from_config(files: ModelFiles, families: Families) -> ModelSpec:
    assert files.config_path is not None
    raw = read_json(files.config_path)
    architecture, family = _family(Metadata(raw, files.config_path), families)
    config = Metadata({**family.defaults, **raw}, files.config_path)
    _refuse_unsupported(config, architecture, family)
    num_layers = _size(config, "num_hidden_layers", "num_layers")
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads", "num_heads")
    if "head_dim" not in config and hidden_size % num_heads:
        raise config.error("num_attention_heads", f"is {num_heads}, which does not divide hidden_size {hidden_size}")
    max_position_embeddings = _size(config, "max_position_embeddings")
    rope, sliding_rope = family.read_ropes(config, max_position_embeddings)
    return ModelSpec(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", "num_kv_heads", num_heads),
        head_dim=_size(config, "head_dim", default=hidden_size // num_heads),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=rope,
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        attention_bias=_has_bias(config, family.attention_bias),
        attention_out_bias=_has_bias(config, family.attention_out_bias),
        mlp_bias=_has_bias(config, family.mlp_bias),
        dtype=_dtype(config, files),
        bos_token_id=_bos_token_id(config),
        eos_token_ids=_eos_token_ids(config, files),
        sliding_windows=read_windows(config, architecture, family, num_layers),
        sliding_rope=sliding_rope,
        query_pre_attn_scalar=_attention_scale(config, family),
    )


def _size(config: Metadata, key: str, field: str | None = None, default: int | None = None) -> int:
    """field: of `ModelSpec`, if its name differs from `key`."""
    return config.integer(key, default, high=MAX_SIZES[field or key])


def _has_bias(config: Metadata, rule: BiasRule) -> bool:
    return rule if isinstance(rule, bool) else config.flag(rule, False)


def _attention_scale(config: Metadata, family: Family) -> float | None:
    return None if family.attention_scale_field is None else config.number(family.attention_scale_field)


def _refuse_unsupported(config: Metadata, architecture: str, family: Family) -> None:
    if "quantization_config" in config:
        raise config.error("quantization_config", "is present: quantized safetensors are not read; a .gguf file is")
    field, known = family.activation_field, _ACTIVATION_NAMES[family.activation]
    if (activation := config.text(field, known[0])) not in known:
        raise config.error(field, f"is {activation!r}; {architecture} computes {known[0]!r}")
    for field in family.not_computed:
        if config.get(field) not in (None, False):
            raise config.error(field, f"is {config.get(field)!r}, which is not computed; give a model without it")


def _dtype(config: Metadata, files: ModelFiles) -> str:
    """From config.json (`torch_dtype` before transformers 5), else the dtype of most tensors."""
    for key in ("dtype", "torch_dtype"):
        if key in config:
            name = config.text(key).removeprefix("torch.")
            if name not in ("float32", "float16", "bfloat16"):
                raise config.error(key, f"is {name!r}; float32, float16 and bfloat16 are known")
            return name
    found = [_DTYPES[e.dtype] for e in TensorIndex(files.weight_files).values() if e.dtype in _DTYPES]
    return max(set(found), key=found.count) if found else "float32"


def _bos_token_id(config: Metadata) -> int | None:
    value = config.get("bos_token_id")
    if isinstance(value, list):  # a few checkpoints have a list of one
        value = value[0] if value else None
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise config.error("bos_token_id", f"is {value!r}, a token id is needed")
    return value


def _eos_token_ids(config: Metadata, files: ModelFiles) -> list[int]:
    """The ids that end a completion: those of generation_config.json, then those of config.json."""
    sources = [config]
    generation = Path(files.path) / "generation_config.json"
    if path_exists(generation):
        sources.insert(0, Metadata(read_json(generation), str(generation)))
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise source.error("eos_token_id", f"is {value!r}, a token id or a list of them is needed")
            if token_id >= 0 and token_id not in ids:  # some files have -1 for none
                ids.append(token_id)
    return ids


def _check_sizes(spec: ModelSpec, source: str) -> None:
    """Checks the sizes against each other."""

    def bad(what: str) -> ModelLoadError:
        return ModelLoadError(f"{source}: {what}", path=source, architecture=spec.architecture)

    if spec.num_heads % spec.num_kv_heads:
        raise bad(f"{spec.num_kv_heads} key/value heads do not divide {spec.num_heads} attention heads")
    if spec.head_dim % 2:
        raise bad(f"head_dim {spec.head_dim} is odd; a rotary embedding rotates pairs")
    for token_id in spec.eos_token_ids:
        if token_id >= spec.vocab_size:
            raise bad(f"eos_token_id {token_id} is outside the vocabulary of {spec.vocab_size}")
