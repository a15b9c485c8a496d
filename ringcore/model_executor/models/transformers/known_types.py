"""What can be done with each type of causal LM that the installed transformers has, or of a model that sees images
beside, by building it on meta.

A program of its own, which `ringcore models` runs: `python -m ... [TYPE ...]` writes a JSON object a line, a type each.
"""

from __future__ import annotations

import json
import logging
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

from ringcore.attention.layer import Attention
from ringcore.checkpoint import ModelFiles, TransformersSpec
from ringcore.checkpoint.gguf_architectures import GGUF_ARCHITECTURES
from ringcore.checkpoint.metadata import Metadata
from ringcore.checkpoint.transformers_spec import read_transformers_spec
from ringcore.distributed.parallel import SingleRank
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.models.transformers.attention_calls import in_one_line
from ringcore.model_executor.models.transformers.model import TransformersModel

__all__ = ["KnownType", "known_type"]

_KNOWN = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}  # type -> model class
_PATH = "the default configuration"  # in place of a file, in errors


class KnownType(msgspec.Struct, frozen=True):
    model_type: str
    architecture: str
    model_impl: str  # what "auto" takes: "native", "transformers", or "refused"
    reason: str = ""  # of a refusal
    is_part: bool = False  # whether it is the text model of several parts, and served as that
    attention: list[str] = []  # what its layers have beside causal attention
    tensor_parallel: bool = False  # whether there is a plan that splits its linears; without, each rank has all of it
    gguf: bool = False  # whether its GGUF files are read


def known_type(model_type: str) -> KnownType:
    """By the default configuration of the type, cut to a few layers where that can be built."""
    name = _KNOWN[model_type]
    architecture = name if isinstance(name, str) else name[0]
    is_native = FAMILIES.native([architecture]) is not None
    try:
        spec = _spec(model_type)
        model = _built(spec)
    except ModelLoadError as error:
        reason = str(error.details.get("reason") or error)
        if is_native:
            return KnownType(model_type, architecture, "native", gguf=_has_gguf(model_type, architecture))
        return KnownType(model_type, architecture, "refused", reason)
    return KnownType(
        model_type,
        architecture,
        "native" if is_native else "transformers",
        is_part=spec.is_part,
        attention=sorted({kind for layer in model.attention_layers for kind in _kinds(layer)}),
        tensor_parallel=is_native or model.has_plan,
        gguf=_has_gguf(model_type, architecture),
    )


def _has_gguf(model_type: str, architecture: str) -> bool:
    found = FAMILIES.native([architecture])
    is_mapped = any(record.model_type == model_type for record in GGUF_ARCHITECTURES.values())
    return is_mapped or (found is not None and found[1].gguf is not None)


def _built(spec: TransformersSpec) -> TransformersModel:
    few = spec.few_layers()
    try:
        return TransformersModel(few, SingleRank(), torch.bfloat16, 1, all_dense)
    except ModelLoadError:  # some have more fields by layer than can be told by their length
        if few == spec:
            raise
    return TransformersModel(spec, SingleRank(), torch.bfloat16, 1, all_dense)


def _kinds(layer: Attention) -> list[str]:
    given = {
        "sliding window": layer.sliding_window is not None,
        "chunks": layer.chunk_size is not None,
        "softcap": layer.softcap is not None,
        "sinks": layer.has_sinks,
        "values of another width": layer.v_head_size is not None,
    }
    return [kind for kind, has in given.items() if has]


def _spec(model_type: str) -> TransformersSpec:
    try:
        config = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    except Exception as error:  # some configurations have no defaults that pass their own checks
        reason = f"it has no default configuration: {in_one_line(error)}"
        raise ModelLoadError(f"{model_type}: {reason}", reason=reason) from error
    files = ModelFiles("dummy", _PATH, None, [], _PATH)
    return read_transformers_spec(Metadata(config | _left_open(config), _PATH), files)


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


def main(types: Sequence[str]) -> None:
    logging.disable(logging.WARNING)  # transformers warns of its own default configurations
    warnings.simplefilter("ignore")
    for model_type in types or sorted(_KNOWN):
        if model_type not in _KNOWN:
            row = KnownType(model_type, "", "refused", "transformers has no causal LM of this type")
        else:
            row = known_type(model_type)
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
