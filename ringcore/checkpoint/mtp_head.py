"""A layer of multi-token prediction (MTP) that a model's own checkpoint has, as a head that drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from ringcore.checkpoint.eagle_head import EagleHeadSpec
from ringcore.checkpoint.expected_tensors import check_tensors, layer_tensors
from ringcore.checkpoint.family import Family
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.model_spec import TEXT_CONFIG, ModelSpec, TransformersSpec
from ringcore.checkpoint.safetensors_header import TensorIndex
from ringcore.errors import ModelLoadError

__all__ = [
    "MTP_TYPES",
    "AnyHeadSpec",
    "MtpForm",
    "MtpHeadSpec",
    "mtp_tensors",
    "num_mtp_layers",
    "own_tensors",
    "read_mtp_head",
    "read_transformers_mtp_head",
]


class MtpForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is around the decoder layer, by its names in the checkpoint: the norms of the embedding and of the features,
    the product of both, and the norm before the model's LM head.

    embedding_first: of the product's inputs. is_normalised: what it goes on with, in the place of features, is the
    output of the last norm; else the input.
    """

    embedding_norm: str
    features_norm: str
    input_proj: str
    norm: str
    embedding_first: bool
    is_normalised: bool


_MIMO = MtpForm("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", False, True)
_DEEPSEEK = MtpForm("enorm", "hnorm", "eh_proj", "shared_head.norm", True, False)
# By type of a model of transformers: what makes the only layer of a configuration one as its MTP layers are.
MTP_TYPES: Mapping[str, Mapping[str, object]] = {
    "deepseek_v3": {"first_k_dense_replace": 0},
    "glm4_moe": {"first_k_dense_replace": 0},
    "glm4_moe_lite": {"mlp_layer_types": ["sparse"]},
}
_COUNT = "num_nextn_predict_layers"
_ONLY_LAYER, _FINAL_NORM = "model.layers.0.", "model.norm."


class MtpHeadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mtp"):
    """layer: a native model, whose layers have the sizes of this one, or a model of transformers that has this layer
    alone. layer_name: in the checkpoint. taps: see `EagleHeadSpec`; one more than after the last layer is after the
    final norm."""

    files: ModelFiles
    layer: ModelSpec | TransformersSpec
    layer_name: str
    form: MtpForm
    norm_eps: float
    taps: list[int]

    @property
    def num_taps(self) -> int:
        return len(self.taps)

    def in_checkpoint(self, name: str) -> str:
        """Of a model of transformers: what the checkpoint calls a tensor of its only layer, or of its final norm."""
        if name.startswith(_FINAL_NORM):
            return f"{self.layer_name}.{self.form.norm}.{name.removeprefix(_FINAL_NORM)}"
        assert name.startswith(_ONLY_LAYER), name
        return f"{self.layer_name}.{name.removeprefix(_ONLY_LAYER)}"

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size


AnyHeadSpec = EagleHeadSpec | MtpHeadSpec


def read_mtp_head(files: ModelFiles, model: ModelSpec, family: Family) -> MtpHeadSpec:
    """The first of the model's layers; further ones are not used. Raises `ModelLoadError` where a tensor is missing or
    has another shape."""
    assert family.mtp_layers is not None, "refused"
    name = f"{family.mtp_layers}.0"
    head = MtpHeadSpec(files, model, name, _MIMO, model.rms_norm_eps, [model.num_layers])
    _check(head, mtp_tensors(head, family))
    return head


def num_mtp_layers(model: TransformersSpec) -> int:
    count = _text_of(msgspec.json.decode(model.config), model).get(_COUNT) or 0
    return count if isinstance(count, int) else 0


def read_transformers_mtp_head(files: ModelFiles, model: TransformersSpec) -> MtpHeadSpec:
    """Likewise, of a type among `MTP_TYPES` with such layers. The tensors of the decoder layer itself are checked with
    the model's, by transformers."""
    whole, count = msgspec.json.decode(model.config), model.num_layers
    eps = _text_of(whole, model).get("rms_norm_eps")
    if not isinstance(eps, float):
        path = files.config_path or files.path
        raise ModelLoadError(f"{path}: field 'rms_norm_eps' is {eps!r}; a number is needed", path=path)
    given = _only_layer(model, whole), f"model.layers.{count}", _DEEPSEEK
    head = MtpHeadSpec(files, *given, eps, [count + 1])
    _check(head, own_tensors(head))
    return head


def _only_layer(model: TransformersSpec, whole: dict[str, object]) -> TransformersSpec:
    """A model of one layer, as the last one is where the configuration has lists."""
    text = _text_of(whole, model)
    for name, value in text.items():
        if isinstance(value, list) and len(value) == model.num_layers:
            text[name] = value[-1:]
    text |= {model.layers_field: 1, **MTP_TYPES[model.model_type]}
    config = msgspec.json.encode(whole | ({TEXT_CONFIG: text} if model.is_part else text)).decode()
    return msgspec.structs.replace(model, num_layers=1, config=config, weight_files=[], quantization=None)


def _text_of(whole: dict[str, object], model: TransformersSpec) -> dict[str, object]:
    found = whole[TEXT_CONFIG] if model.is_part else whole
    assert isinstance(found, dict), whole
    return dict(found)


def own_tensors(head: MtpHeadSpec) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors around the decoder layer, by their names in the checkpoint."""
    hidden, name, form = head.layer.hidden_size, head.layer_name, head.form
    norms: Iterable[str] = form.embedding_norm, form.features_norm, form.norm
    return {f"{name}.{form.input_proj}.weight": (hidden, 2 * hidden)} | {
        f"{name}.{norm}.weight": (hidden,) for norm in norms
    }


def mtp_tensors(head: MtpHeadSpec, family: Family) -> dict[str, tuple[int, ...]]:
    """Of a native model: the shape of every tensor, by its name in the checkpoint."""
    assert isinstance(head.layer, ModelSpec), head
    return own_tensors(head) | layer_tensors(head.layer, family, 0, head.layer_name)


def _check(head: MtpHeadSpec, expected: dict[str, tuple[int, ...]]) -> None:
    if head.files.kind != "safetensors":
        return
    index = TensorIndex(head.files.weight_files)
    shapes = {name: entry.shape for name, entry in index.items()}
    check_tensors(expected, shapes, head.files.path, lambda name: index[name].file, lambda name: True)
