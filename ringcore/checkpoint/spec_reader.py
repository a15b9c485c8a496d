"""Reads the spec of a model from its files: of a native one from config.json here and from a GGUF header in
`gguf_spec`, of any other in `transformers_spec`, which has a GGUF header by `gguf_config` as config.json."""

from __future__ import annotations

import msgspec

from ringcore.checkpoint.common_fields import read_bos_token_id, read_dtype, read_eos_token_ids
from ringcore.checkpoint.expected_tensors import EXPERT_MATRICES, ROUTER, expert_matrix
from ringcore.checkpoint.family import Activation, BiasRule, Families, Family
from ringcore.checkpoint.gguf_config import read_gguf_config
from ringcore.checkpoint.gguf_header import read_gguf_header
from ringcore.checkpoint.gguf_spec import read_gguf_spec
from ringcore.checkpoint.metadata import Metadata, read_json
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.model_spec import MAX_SIZES, AnySpec, CommonSpec, ExpertsSpec, ModelSpec
from ringcore.checkpoint.quantization import Quantization
from ringcore.checkpoint.quantization.expert_formats import can_stack
from ringcore.checkpoint.quantization.reader import read_quantization
from ringcore.checkpoint.sliding_windows import read_windows
from ringcore.checkpoint.transformers_spec import read_transformers_spec
from ringcore.errors import ModelLoadError

__all__ = ["read_model_spec", "read_native_spec"]

_NOT_OF_EXPERTS = "with a scale of the inputs of each, which is not computed; give another checkpoint"
# The names that config.json has for an activation.
_ACTIVATION_NAMES: dict[Activation, tuple[str, ...]] = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}


def read_model_spec(
    files: ModelFiles, families: Families, model_impl: str = "auto", quantization: str | None = None
) -> AnySpec:
    """The model's spec. model_impl: the engine option; "auto" is native where the architecture has a family.
    quantization: the engine option.

    Raises `ModelLoadError` for an architecture that there is no model for, a missing or invalid field (naming it and
    the file), and for what the model classes do not implement: sliding windows where the architecture has none, partial
    rotary embeddings, unknown quantization, capped logits, another activation than the architecture's.
    """
    if files.config_path is None:
        if quantization is not None:
            raise ModelLoadError(
                f"{files.path}: quantization={quantization!r} needs 16-bit safetensors, not a .gguf file; leave it out",
                path=files.path,
            )
        return _from_gguf(files, families, model_impl)
    config = Metadata(read_json(files.config_path), files.config_path)
    found = None if model_impl == "transformers" else families.native(_architectures(config))
    if found is not None:
        return _checked(_from_config(config, files, *found, quantization), files.config_path)
    if model_impl == "native":
        known = ", ".join(sorted(families.architectures))
        architecture = _architectures(config)[0]
        raise ModelLoadError(
            f"{config.path}: the architecture {architecture!r} has no native model; known: {known}; "
            "give model_impl='auto' for transformers' own",
            path=config.path,
            architecture=architecture,
        )
    spec = read_transformers_spec(config, files, quantization)
    _check_eos(spec, config.path)
    return spec


def read_native_spec(config: Metadata, files: ModelFiles, architecture: str, family: Family) -> ModelSpec:
    """Of fields that are given as config.json's of this family. Raises `ModelLoadError`."""
    return _checked(_from_config(config, files, architecture, family, None), config.path)


def _from_gguf(files: ModelFiles, families: Families, model_impl: str) -> AnySpec:
    header = read_gguf_header(files.path)
    is_native = header.metadata.get("general.architecture") in families.gguf_names
    if model_impl == "native" or (model_impl == "auto" and is_native):
        return _checked(read_gguf_spec(files.path, families), files.path)
    spec = read_transformers_spec(read_gguf_config(header, families), files)
    _check_eos(spec, files.path)
    return spec


def _architectures(config: Metadata) -> list[str]:
    names = config.required("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or not names:
        raise config.error("architectures", f"is {names!r}, a list of one name is needed")
    return names


def _from_config(
    given: Metadata, files: ModelFiles, architecture: str, family: Family, quantization: str | None
) -> ModelSpec:
    config = Metadata({**family.defaults, **given.values}, given.path)
    _refuse_unsupported(config, architecture, family)
    num_layers = _size(config, "num_hidden_layers", "num_layers")
    hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads", "num_heads")
    if "head_dim" not in config and hidden_size % num_heads:
        raise config.error("num_attention_heads", f"is {num_heads}, which does not divide hidden_size {hidden_size}")
    max_position_embeddings = _size(config, "max_position_embeddings")
    rope, sliding_rope = family.read_ropes(config, max_position_embeddings)
    experts = None if family.read_experts is None else family.read_experts(config, num_layers)
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
        dtype=read_dtype(config, files),
        bos_token_id=read_bos_token_id(config),
        eos_token_ids=read_eos_token_ids(config, files),
        sliding_windows=read_windows(config, architecture, family, num_layers),
        sliding_rope=sliding_rope,
        query_pre_attn_scalar=_attention_scale(config, family),
        quantization=_quantization(config, quantization, experts),
        experts=experts,
        num_mtp_layers=0 if family.mtp_layers is None else config.integer("num_nextn_predict_layers", 0, low=0),
    )


def _quantization(config: Metadata, on_load: str | None, experts: ExpertsSpec | None) -> Quantization | None:
    """A tied head is the embedding's table, which is dense; so is a router."""
    found = read_quantization(config, on_load)
    if found is None:
        return None
    if found.experts is not None:
        raise config.error("quantization_config", f"is {found.method!r}, which is of experts of transformers' models")
    ignored = ["lm_head"] if config.flag("tie_word_embeddings", False) else []
    if experts is not None:
        matrix = f"model.layers.0.{expert_matrix('mlp', 0, EXPERT_MATRICES[0])}"
        if not can_stack(found.format_of(matrix)):
            raise config.error("quantization_config", f"quantizes experts in {found.method!r}, {_NOT_OF_EXPERTS}")
        ignored.append(ROUTER)
    return msgspec.structs.replace(found, ignored=[*found.ignored, *ignored])


def _size(config: Metadata, key: str, field: str | None = None, default: int | None = None) -> int:
    """field: of `ModelSpec`, if its name differs from `key`."""
    return config.integer(key, default, high=MAX_SIZES[field or key])


def _has_bias(config: Metadata, rule: BiasRule) -> bool:
    return rule if isinstance(rule, bool) else config.flag(rule, False)


def _attention_scale(config: Metadata, family: Family) -> float | None:
    return None if family.attention_scale_field is None else config.number(family.attention_scale_field)


def _refuse_unsupported(config: Metadata, architecture: str, family: Family) -> None:
    field, known = family.activation_field, _ACTIVATION_NAMES[family.activation]
    if (activation := config.text(field, known[0])) not in known:
        raise config.error(field, f"is {activation!r}; {architecture} computes {known[0]!r}")
    for field in family.not_computed:
        if config.get(field) not in (None, False):
            raise config.error(field, f"is {config.get(field)!r}, which is not computed; give a model without it")


def _checked(spec: ModelSpec, source: str) -> ModelSpec:
    """The spec, its sizes checked against each other."""
    if spec.num_heads % spec.num_kv_heads:
        raise _bad(spec, source, f"{spec.num_kv_heads} key/value heads do not divide {spec.num_heads} attention heads")
    if spec.head_dim % 2:
        raise _bad(spec, source, f"head_dim {spec.head_dim} is odd; a rotary embedding rotates pairs")
    _check_eos(spec, source)
    return spec


def _check_eos(spec: CommonSpec, source: str) -> None:
    for token_id in spec.eos_token_ids:
        if token_id >= spec.vocab_size:
            raise _bad(spec, source, f"eos_token_id {token_id} is outside the vocabulary of {spec.vocab_size}")


def _bad(spec: CommonSpec, source: str, what: str) -> ModelLoadError:
    return ModelLoadError(f"{source}: {what}", path=source, architecture=spec.architecture)
