"""What can be done with each type of causal LM that the installed transformers has, by building it on meta.

`main` is a program of its own, which `ringcore models` runs by `lean_programs`: it writes a JSON object a line, a type
each.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from ringcore.attention.layer import AnyAttention, LatentAttention
from ringcore.checkpoint import ModelFiles, TransformersSpec
from ringcore.checkpoint.family import Family
from ringcore.checkpoint.gguf_architectures import GGUF_ARCHITECTURES
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.transformers_spec import read_transformers_spec
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.construction import on_meta
from ringcore.model_executor.models.transformers.few_layers import few_layers
from ringcore.model_executor.models.transformers.graph_capture import kept_from_graphs
from ringcore.model_executor.models.transformers.model import TransformersModel
from ringcore.model_executor.models.transformers.needs import Need
from ringcore.model_executor.models.transformers.published_fields import with_published_fields
from ringcore.model_executor.models.transformers.refusal import in_one_line
from ringcore.model_executor.models.transformers.text_part import keep_text
from ringcore.protocol.model_report import ModelReport

__all__ = ["TYPES", "KnownType", "architecture_of", "default_configuration", "known_type", "spec_of"]

_KNOWN = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}  # type -> model class
TYPES: Sequence[str] = sorted(_KNOWN)
_PATH = "the default configuration"  # in place of a file, in errors


class KnownType(msgspec.Struct, frozen=True):
    model_type: str
    architecture: str
    model_impl: str  # what "auto" takes: "native", "transformers", or "refused"
    reason: str = ""  # of a refusal
    needs: str = ""  # of a refused one, what it would need
    is_planned: bool = False  # whether that is planned
    is_part: bool = False  # whether it is the text model of several parts, and served as that
    kv_cache: list[str] = []  # the kinds of its layers' caches
    attention: list[str] = []  # what its layers have beside causal attention
    tensor_parallel: bool = False  # whether there is a plan that splits its linears; without, each rank has all of it
    share_of_two: float | None = None  # of the last layer's weights, the part that each of two ranks holds
    two_ranks_refused: str = ""  # the reason where two ranks are refused
    kept_from_graphs: str = ""  # what keeps its pass from CUDA graphs, as far as a pass on meta tells
    gguf: str = ""  # the architecture by which a GGUF file has it
    fused: str = ""  # what of its layers is computed by ours


def architecture_of(model_type: str) -> str:
    name: str | tuple[str, ...] = _KNOWN[model_type]
    return name if isinstance(name, str) else name[0]


def known_type(model_type: str) -> KnownType:
    """By the default configuration of the type, cut to a few layers where that can be built."""
    architecture = architecture_of(model_type)
    native = FAMILIES.native([architecture])
    try:
        spec, model = _built_of(model_type)
    except ModelLoadError as error:
        if native is not None:
            return KnownType(model_type, architecture, "native", gguf=_gguf(model_type, native))
        need = _need(error)
        reason = str(error.details.get("reason") or error)
        return KnownType(model_type, architecture, "refused", reason, need.text, need.is_planned)
    share, refusal = _share_of_two(spec, model)
    return KnownType(
        model_type,
        architecture,
        "transformers" if native is None else "native",
        is_part=spec.is_part,
        kv_cache=sorted({_cache_kind(layer) for layer in model.attention_layers}),
        attention=sorted({kind for layer in model.attention_layers for kind in _kinds(layer)}),
        tensor_parallel=native is not None or model.has_plan,
        share_of_two=share,
        two_ranks_refused=refusal,
        kept_from_graphs=_kept_from_graphs(spec) or "",
        gguf=_gguf(model_type, native),
        fused=_fused(model.report()),
    )


def _built_of(model_type: str) -> tuple[TransformersSpec, TransformersModel]:
    """The model of the default configuration, and the spec that could be built, of a few layers where possible."""
    config = default_configuration(model_type)
    try:
        return _built(spec_of(config))
    except ModelLoadError as error:
        if error.details.get("field") is None:
            raise
        open_sizes = _sizes_elsewhere(model_type, config)
        if not open_sizes:
            raise
        _built(spec_of(config | open_sizes))  # what it says of the model is nearer to the cause than a missing field
        raise


def _built(spec: TransformersSpec) -> tuple[TransformersSpec, TransformersModel]:
    few = few_layers(spec)
    return few, _on_ranks(few, SingleRank())


def _on_ranks(spec: TransformersSpec, tp: TensorParallel) -> TransformersModel:
    return TransformersModel(spec, tp, torch.bfloat16, 1, all_dense)


class _FirstOfTwo(SingleRank):
    """Rank 0 of a model over two that is built and never run."""

    size = 2


def _share_of_two(spec: TransformersSpec, whole: TransformersModel) -> tuple[float | None, str]:
    """(of its last layer's bytes, the part that each of two ranks holds; or why two are refused)."""
    try:
        share = _on_ranks(spec, _FirstOfTwo())
    except ModelLoadError as error:
        return None, str(error.details.get("reason") or error)
    return round(_last_layer_bytes(share) / _last_layer_bytes(whole), 3), ""


def _last_layer_bytes(model: TransformersModel) -> int:
    last = re.compile(rf"\.{model.report().num_layers - 1}\.")
    return sum(weight.nbytes for weight in model.weights() if last.search(weight.name))


def _kept_from_graphs(spec: TransformersSpec) -> str | None:
    with torch.inference_mode(False), torch.no_grad():
        body = Body(on_meta(spec, torch.bfloat16))
        keep_text(body, spec.max_position_embeddings)
        return kept_from_graphs(body)


def _gguf(model_type: str, native: tuple[str, Family] | None) -> str:
    if native is not None and native[1].gguf is not None:
        return native[1].gguf.name
    names = [name for name, record in GGUF_ARCHITECTURES.items() if record.model_type == model_type]
    return ", ".join(names) or ("" if native is None else "as another family")


def _fused(report: ModelReport) -> str:
    """Residuals and norms ("layers"), attentions, MLPs, experts: what is ours, in a share of the layers if not in
    all."""
    kinds = ("layers", "attentions", "mlps", "experts")
    shares = {kind: min(report.fused.get(kind, 0) / report.num_layers, 1.0) for kind in kinds}
    if all(shares[kind] == 1 for kind in kinds[:3]) and not shares["experts"]:
        return "all"
    return ", ".join(kind if share == 1 else f"{kind} in {share:.0%}" for kind, share in shares.items() if share)


def _cache_kind(layer: AnyAttention) -> str:
    return str(type(layer.kv_cache_spec(1, "bfloat16")).__struct_config__.tag).replace("_", " ")


def _kinds(layer: AnyAttention) -> list[str]:
    if isinstance(layer, LatentAttention):
        return []
    given = {
        "chunks": layer.chunk_size is not None,
        "sliding window": layer.sliding_window is not None,
        "softcap": layer.softcap is not None,
        "sinks": layer.has_sinks,
        "values of another width": layer.v_head_size is not None,
    }
    return [kind for kind, has in given.items() if has]


def _need(error: ModelLoadError) -> Need:
    match error.details:
        case {"need": str(name)}:
            return Need[name]
        case {"field": "text_config"}:
            return Need.CONFIGURATION
        case {"field": "is_encoder_decoder"}:
            return Need.DECODER
        case _:
            return Need.OTHER


def default_configuration(model_type: str) -> dict[str, Any]:
    """With the fields that published models have, where it cannot be built without them. Raises `ModelLoadError` where
    transformers has none that passes its own checks."""
    try:
        config: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    except Exception as error:
        reason = f"it has no default configuration: {in_one_line(error)}"
        need = Need.CONFIGURATION.name
        raise ModelLoadError(f"{model_type}: {reason}", reason=reason, need=need) from error
    config = with_published_fields(model_type, config)
    return config | _left_open(config)


def spec_of(config: Mapping[str, Any]) -> TransformersSpec:
    """Raises `ModelLoadError` for what is refused before a model is built."""
    files = ModelFiles("dummy", _PATH, None, [], _PATH)
    return read_transformers_spec(Metadata(dict(config), _PATH), files)


def _left_open(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a default configuration has as a field without a value, though the model needs one; and a model that may be
    an encoder is to be a decoder."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    fills: dict[str, Any] = {
        "head_dim": hidden // heads if isinstance(heads, int) and isinstance(hidden, int) else None,
        "num_key_value_heads": heads,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    filled = {name: value for name, value in fills.items() if name in config and config[name] is None}
    return filled | ({"is_decoder": True} if "is_decoder" in config else {})


def _sizes_elsewhere(model_type: str, config: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that a configuration lacks by the names that are looked for, as transformers' own class tells them."""
    default = CONFIG_MAPPING[model_type]()
    found = {"max_position_embeddings": 2048}  # of a model without a limit
    for name in ("num_hidden_layers", "hidden_size", "max_position_embeddings"):
        try:
            value = getattr(default, name)
        except Exception:  # a property of it may raise anything
            continue
        if isinstance(value, int) and value > 0:
            found[name] = value
    return {name: value for name, value in found.items() if name not in config}


def main(types: Sequence[str]) -> None:
    logging.disable(logging.WARNING)  # transformers warns of its own default configurations
    warnings.simplefilter("ignore")
    for model_type in types or TYPES:
        if model_type not in TYPES:
            row = KnownType(
                model_type, "", "refused", "transformers has no causal LM of this type", "a transformers that has one"
            )
        else:
            row = known_type(model_type)
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        sys.stdout.flush()
