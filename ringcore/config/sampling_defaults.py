"""The sampling parameters that a model's authors recommend: those of its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ringcore.checkpoint import ModelFiles
from ringcore.checkpoint.metadata import Metadata, read_json
from ringcore.checkpoint.model_file import path_exists
from ringcore.errors import InvalidRequestError
from ringcore.params.sampling_params import SamplingParams

__all__ = ["read_sampling_defaults"]

# By our names, theirs. `do_sample` is not read: a temperature of 0 is greedy here.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}


def read_sampling_defaults(files: ModelFiles) -> dict[str, Any]:
    """Those that the file has, by the names of `SamplingParams`; empty without a file. Raises `ModelLoadError` for a
    value that no request could have."""
    path = Path(files.path) / "generation_config.json"
    if not path_exists(path):
        return {}
    found = Metadata(read_json(path), str(path))
    defaults: dict[str, Any] = {}
    for name, theirs in _FIELDS.items():
        if theirs not in found:
            continue
        defaults[name] = found.get(theirs)
        try:
            SamplingParams(**{name: defaults[name]})
        except InvalidRequestError as error:
            remedy = "mend it, or give generation_config='ringcore', which does not read it"
            raise found.error(theirs, f"is no sampling parameter: {error.message}; {remedy}") from error
    return defaults
