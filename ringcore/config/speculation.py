"""The engine option `speculative`: speculative decoding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ringcore.checkpoint import AnySpec, Families, ModelFiles, ModelSpec, TransformersSpec, find_model
from ringcore.checkpoint.eagle_head import read_eagle_head
from ringcore.checkpoint.mtp_head import (
    MTP_TYPES,
    AnyHeadSpec,
    num_mtp_layers,
    read_mtp_head,
    read_transformers_mtp_head,
)
from ringcore.config.split_checks import check_split
from ringcore.config.value_checks import bad_value
from ringcore.errors import ConfigError, unknown_option

__all__ = [
    "SPECULATIVE_METHODS",
    "Speculation",
    "check_head_split",
    "check_speculative",
    "draft_head_of",
    "speculation_of",
    "with_plain_path",
]

HEAD, MTP = "eagle3", "mtp"
SPECULATIVE_METHODS = ("suffix", HEAD, MTP)
MAX_DRAFTS = 64
_MAX_SHARED_TOKENS = 1 << 28
_MOST_OF_HEADS, _DRAFTS_OF_HEADS, _DRAFTS_OF_MTP = 16, 4, 2  # a head runs once for each draft
_OF_SUFFIXES = ("min_match", "shared_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The fields of the option.

    method: "suffix", drafts that followed the row's last tokens before; "eagle3", of a head that was trained for the
    model; "mtp", of the layer of multi-token prediction that the model's checkpoint has; or 'module:Class' of a
    proposer of your own (`worker.drafts.proposer`). num_drafts: the most drafts of a row in a step. min_match: a row
    has drafts where at least this many of its last tokens stood before. shared_tokens: tokens of completions of other
    requests that are kept to draft from, the oldest dropped first; 0 drafts from a request's own tokens alone. model:
    the folder of the head, also of a `HeadProposer` of your own.
    """

    method: str
    num_drafts: int = 8
    min_match: int = 3
    shared_tokens: int = 1 << 18
    model: str | None = None

    @property
    def is_by_head(self) -> bool:
        return self.model is not None or self.method == MTP


def speculation_of(given: Mapping[str, Any] | None) -> Speculation | None:
    """The option with its defaults."""
    if given is None:
        return None
    by_head = {} if given.get("model") is None else {"num_drafts": _DRAFTS_OF_HEADS}
    defaults = {"num_drafts": _DRAFTS_OF_MTP} if given["method"] == MTP else by_head
    return Speculation(**{**defaults, **given})


def with_plain_path(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The option as it is sent to other processes."""
    if given is None or given.get("model") is None:
        return None if given is None else dict(given)
    return {**given, "model": os.path.abspath(os.path.expanduser(os.fspath(given["model"])))}


def draft_head_of(
    given: Mapping[str, Any] | None, files: ModelFiles, spec: AnySpec, families: Families
) -> AnyHeadSpec | None:
    """The head that the option names; None: it names none. files, spec: of the model.

    Raises `ConfigError` for a model that has no place for one, `ModelLoadError` where the head is not of this model.
    """
    if given is None or (given.get("model") is None and given["method"] != MTP):
        return None
    refused = _refused_model(spec, families) or (
        _refused_mtp(files, spec, families) if given["method"] == MTP else None
    )
    if refused is not None:
        raise bad_value("speculative", given, f"{refused}; give {{'method': 'suffix'}}, or leave this out")
    if given["method"] == MTP:
        if isinstance(spec, TransformersSpec):
            return read_transformers_mtp_head(files, spec)
        return read_mtp_head(files, spec, families[spec.architecture])
    found = find_model(given["model"], "dummy" if files.kind == "dummy" else "safetensors")
    return read_eagle_head(found, spec)


def _refused_mtp(files: ModelFiles, spec: AnySpec, families: Families) -> str | None:
    if isinstance(spec, TransformersSpec):
        is_known, count = spec.model_type in MTP_TYPES, num_mtp_layers(spec)
    else:
        is_known, count = families[spec.architecture].mtp_layers is not None, spec.num_mtp_layers
    if not is_known:
        known = [name for name in families.architectures if families[name].mtp_layers is not None]
        names = ", ".join([*known, *MTP_TYPES])
        return f"layers of multi-token prediction are computed of {names}, and not of a {spec.architecture}"
    if not count:
        return "this checkpoint has no layers of multi-token prediction (num_nextn_predict_layers is 0)"
    if files.kind == "gguf":
        return "layers of multi-token prediction are read of safetensors, and this is a GGUF file"
    if spec.quantization is not None and not spec.quantization.is_on_load:
        return "layers of multi-token prediction are computed in 16 bits, and this checkpoint is quantized"
    return None


def check_head_split(head: AnyHeadSpec, given: Mapping[str, Any] | None, size: int) -> None:
    """size: tensor_parallel_size, over which the model itself can be split. Raises `ConfigError`."""
    if isinstance(head.layer, TransformersSpec):  # split as the model's own layers are
        return
    try:
        check_split(head.layer, size, expert_parallel=False)
    except ConfigError as error:
        raise bad_value("speculative", given, f"of the head: {error}") from error


def _refused_model(spec: AnySpec, families: Families) -> str | None:
    if isinstance(spec, ModelSpec) and families[spec.architecture].scaled_embeddings:
        return f"a {spec.architecture} scales its embeddings, which heads are not trained for"
    return None


def check_speculative(options: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a value of `speculative` that cannot be served."""
    given = options["speculative"]
    if given is None:
        return
    if not isinstance(given, dict) or "method" not in given:
        raise bad_value("speculative", given, 'give an object as {"method": "suffix"}, or None')
    names = [field.name for field in fields(Speculation)]
    for name in given:
        if name not in names:
            raise unknown_option(name, names, "field of speculative")
    method = given["method"]
    if not isinstance(method, str) or (method not in SPECULATIVE_METHODS and ":" not in method):
        remedy = f"give one of {', '.join(SPECULATIVE_METHODS)}, or 'module:Class' of a proposer"
        raise bad_value("speculative.method", method, remedy)
    _check_head(given)
    for name, low, high in (
        ("num_drafts", 1, _MOST_OF_HEADS if given.get("model") is not None or method == MTP else MAX_DRAFTS),
        ("min_match", 1, 32),
        ("shared_tokens", 0, _MAX_SHARED_TOKENS),
    ):
        _check_between(f"speculative.{name}", given.get(name, low), low, high)
    if options["pipeline_parallel_size"] != 1:
        raise bad_value(
            "speculative",
            given,
            f"drafts need the last token where the step begins, and with pipeline_parallel_size="
            f"{options['pipeline_parallel_size']} the last stage alone has it; give pipeline_parallel_size=1, or leave "
            "this out",
        )


def _check_head(given: Mapping[str, Any]) -> None:
    """The fields that one method alone has."""
    method, folder = given["method"], given.get("model")
    if folder is None and method not in (HEAD, MTP):
        return
    if folder is not None and method in ("suffix", MTP):
        raise bad_value("speculative.model", folder, f"it is the folder of a head; give method {HEAD!r} too")
    for name in _OF_SUFFIXES:
        if name in given:
            raise bad_value(f"speculative.{name}", given[name], "it is of the method 'suffix'; leave it out")
    if method == MTP:
        return
    if not isinstance(folder, str | os.PathLike) or not Path(folder).expanduser().is_dir():
        raise bad_value("speculative.model", folder, "give the folder of a head, with config.json and safetensors")


def _check_between(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r}: give an integer from {low} to {high}", option=name, value=repr(value))
