"""The files of a head that drafts tokens for a model (EAGLE-3, arXiv 2503.01840), read and checked before a worker
starts: a decoder layer over hidden states of the model, with its own folder.

Published heads come in two layouts: config.json is that of one Llama layer and its tensors are `midlayer.*`; or that of
speculators, with the layer's fields in `transformer_layer_config` and tensors `layers.0.*`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ringcore.checkpoint.expected_tensors import check_tensors, is_dispensable
from ringcore.checkpoint.family import Family
from ringcore.checkpoint.matrix_tensors import BIAS
from ringcore.checkpoint.metadata import Metadata, read_json
from ringcore.checkpoint.model_file import open_model_file
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.model_spec import MAX_SIZES, CommonSpec, ModelSpec
from ringcore.checkpoint.safetensors_header import TensorIndex
from ringcore.checkpoint.spec_reader import read_native_spec
from ringcore.errors import ModelLoadError

__all__ = ["LAYER_FAMILY", "NUM_TAPS", "EagleHeadSpec", "head_tensors", "read_eagle_head", "read_vocabulary_map"]

NUM_TAPS = 3
LAYER_FAMILY = Family(
    architectures=(), model="", defaults={"bos_token_id": None, "eos_token_id": None}, mlp_bias="mlp_bias"
)
_NESTED = "transformer_layer_config"
_MAP, _EMBEDDING = "d2t", "embed_tokens.weight"
_MASK = "t2d"  # which tokens have a place in the draft vocabulary: follows from the map


class EagleHeadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="eagle3"):
    """layer: the sizes of its one layer. taps: the layers of the model before which the residual stream is taken, that
    many being after the last."""

    files: ModelFiles
    layer: ModelSpec
    draft_vocab_size: int  # tokens that it can draft
    taps: list[int]
    layer_name: str  # in the checkpoint
    has_embedding: bool  # of its own; else it shares the model's
    has_map: bool  # from draft ids to ids; else they are the same
    norm_before_residual: bool  # the residual stream starts with the normalised features

    @property
    def num_taps(self) -> int:
        return len(self.taps)


def read_eagle_head(files: ModelFiles, model: CommonSpec) -> EagleHeadSpec:
    """Raises `ModelLoadError` that names the file and the field or tensor, for a head that is of another model too."""
    assert files.config_path is not None, files
    whole = Metadata(read_json(files.config_path), files.config_path)
    nested = whole.child(_NESTED)
    given = whole if nested is None else nested
    own = {"tie_word_embeddings": False, "num_hidden_layers": 1}
    config = Metadata({**given.values, **own}, given.path, given.prefix)
    if whole.integer("num_hidden_layers" if nested is None else "num_layers", 1) != 1:
        raise whole.error("num_hidden_layers", "is above 1; a head has one layer")
    for name in ("quantization_config", "compression_config"):
        if name in whole:
            raise whole.error(name, "is given: a quantized head is not computed; give one in 16 bits")
    layer = read_native_spec(config, files, "", LAYER_FAMILY)
    _check_sizes(whole, layer, model)
    draft_vocab_size = whole.integer("draft_vocab_size", model.vocab_size, high=MAX_SIZES["vocab_size"])
    if draft_vocab_size > model.vocab_size:
        raise whole.error("draft_vocab_size", f"is {draft_vocab_size}, above the model's {model.vocab_size} tokens")
    names = TensorIndex(files.weight_files)
    head = EagleHeadSpec(
        files=files,
        layer=msgspec.structs.replace(layer, vocab_size=model.vocab_size),
        draft_vocab_size=draft_vocab_size,
        taps=_taps(whole, model.num_layers),
        layer_name="midlayer" if nested is None else "layers.0",
        has_embedding=_EMBEDDING in names,
        has_map=_MAP in names,
        norm_before_residual=whole.flag("norm_before_residual", False),
    )
    if files.kind == "safetensors":
        _check_files(head, names)
    return head


def _check_sizes(config: Metadata, layer: ModelSpec, model: CommonSpec) -> None:
    sizes = {"hidden_size": layer.hidden_size, "target_hidden_size": config.get("target_hidden_size")}
    for name, size in sizes.items():
        if size not in (None, model.hidden_size):
            raise config.error(
                name, f"is {size}, and that of the {model.architecture} is {model.hidden_size}; give a head of this one"
            )


def _taps(config: Metadata, num_layers: int) -> list[int]:
    """Absent: those that EAGLE-3 trains with. In `eagle_config` a number is the layer whose output is taken."""
    name, nested = "eagle_aux_hidden_state_layer_ids", config.child("eagle_config")
    given = config.get(name) or None
    if nested is not None and not nested.flag("use_aux_hidden_state", True):
        raise nested.error("use_aux_hidden_state", "is false; a head of EAGLE-3 has hidden states of several layers")
    if given is None and nested is not None and isinstance(outputs := nested.get(name), list) and outputs:
        given = [one + 1 if type(one) is int else one for one in outputs]
    if given is None:
        given = [2, num_layers // 2, num_layers - 3]
    is_list = isinstance(given, list) and len(given) == NUM_TAPS
    if not is_list or not all(type(one) is int and 0 <= one <= num_layers for one in given):
        raise config.error(name, f"is {given!r}, a list of {NUM_TAPS} layers from 0 to {num_layers} is needed")
    return list(given)


def head_tensors(head: EagleHeadSpec) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is read as a weight, by its name in the checkpoint."""
    spec, name = head.layer, head.layer_name
    hidden, heads, kv_heads = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    inner = spec.intermediate_size
    tensors: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, NUM_TAPS * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (head.draft_vocab_size, hidden),
    }
    if head.has_embedding:
        tensors[_EMBEDDING] = spec.vocab_size, hidden
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"{name}.{norm}.weight"] = (hidden,)
    for matrix, size, has_bias in (
        ("self_attn.q_proj", (heads, 2 * hidden), spec.attention_bias),
        ("self_attn.k_proj", (kv_heads, 2 * hidden), spec.attention_bias),
        ("self_attn.v_proj", (kv_heads, 2 * hidden), spec.attention_bias),
        ("self_attn.o_proj", (hidden, heads), spec.attention_out_bias),
        ("mlp.gate_proj", (inner, hidden), spec.mlp_bias),
        ("mlp.up_proj", (inner, hidden), spec.mlp_bias),
        ("mlp.down_proj", (hidden, inner), spec.mlp_bias),
    ):
        tensors[f"{name}.{matrix}.weight"] = size
        if has_bias:
            tensors[f"{name}.{matrix}.{BIAS.suffix}"] = size[:1]
    return tensors


def _check_files(head: EagleHeadSpec, index: TensorIndex) -> None:
    expected, shapes = head_tensors(head), {name: entry.shape for name, entry in index.items()}

    def may_ignore(name: str) -> bool:
        return name in (_MAP, _MASK) or is_dispensable(name)

    check_tensors(expected, shapes, head.files.path, lambda name: index[name].file, may_ignore)
    if not head.has_map and head.draft_vocab_size != head.layer.vocab_size:
        path = head.files.path
        raise ModelLoadError(
            f"{path}: tensor {_MAP!r} is missing: {head.draft_vocab_size} draft tokens are some of the "
            f"{head.layer.vocab_size} of the model, and it says which; download the head again",
            path=path,
            tensor=_MAP,
        )
    read_vocabulary_map(head)


def read_vocabulary_map(head: EagleHeadSpec) -> np.ndarray | None:
    """[draft_vocab_size] int64, the id of each draft token; None: its own. Raises `ModelLoadError` where one is outside
    the vocabulary."""
    if not head.has_map:
        return None
    entry = TensorIndex(head.files.weight_files)[_MAP]
    size = head.draft_vocab_size

    def bad(what: str) -> ModelLoadError:
        return ModelLoadError(f"{entry.file}: tensor {_MAP!r} {what}", path=entry.file, tensor=_MAP)

    if entry.dtype not in ("I64", "I32") or entry.shape != (size,):
        raise bad(f"is {entry.dtype} {list(entry.shape)}, and I64 [{size}] is needed: draft_vocab_size of config.json")
    with open_model_file(entry.file) as file:
        file.seek(entry.begin)
        data = file.read(entry.nbytes)
    if len(data) != entry.nbytes:
        raise bad("is cut off; download the file again")
    offsets = np.frombuffer(data, dtype="<i8" if entry.dtype == "I64" else "<i4").astype(np.int64)
    ids: np.ndarray = offsets + np.arange(size)
    outside = np.flatnonzero((ids < 0) | (ids >= head.layer.vocab_size))
    if len(outside):
        first = int(outside[0])
        raise bad(
            f"maps draft token {first} to {int(ids[first])}, outside the {head.layer.vocab_size} tokens of the model; "
            "give a head of this model"
        )
    return ids
