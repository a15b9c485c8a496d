"""A layer of multi-token prediction (MTP) that a model's own checkpoint has, as a head that drafts."""

from __future__ import annotations

import msgspec

from ringcore.checkpoint.eagle_head import EagleHeadSpec
from ringcore.checkpoint.expected_tensors import check_tensors, layer_tensors
from ringcore.checkpoint.family import Family
from ringcore.checkpoint.model_files import ModelFiles
from ringcore.checkpoint.model_spec import ModelSpec
from ringcore.checkpoint.safetensors_header import TensorIndex

__all__ = ["AnyHeadSpec", "MtpHeadSpec", "mtp_tensors", "read_mtp_head"]


class MtpHeadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mtp"):
    """layer: the sizes are those of the model's layers. layer_name: in the checkpoint."""

    files: ModelFiles
    layer: ModelSpec
    layer_name: str

    @property
    def num_taps(self) -> int:
        return 1

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size


AnyHeadSpec = EagleHeadSpec | MtpHeadSpec


def read_mtp_head(files: ModelFiles, model: ModelSpec, family: Family) -> MtpHeadSpec:
    """The first of the model's layers; further ones are not used. Raises `ModelLoadError` where a tensor is missing or
    has another shape."""
    assert family.mtp_layers is not None, "refused"
    head = MtpHeadSpec(files=files, layer=model, layer_name=f"{family.mtp_layers}.0")
    if files.kind == "safetensors":
        index = TensorIndex(files.weight_files)
        shapes = {name: entry.shape for name, entry in index.items()}
        check_tensors(mtp_tensors(head, family), shapes, files.path, lambda name: index[name].file, lambda name: True)
    return head


def mtp_tensors(head: MtpHeadSpec, family: Family) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name in the checkpoint."""
    hidden, name = head.layer.hidden_size, head.layer_name
    tensors: dict[str, tuple[int, ...]] = {f"{name}.input_proj.weight": (hidden, 2 * hidden)}
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{name}.{norm}.weight"] = (hidden,)
    return tensors | layer_tensors(head.layer, family, 0, name)
