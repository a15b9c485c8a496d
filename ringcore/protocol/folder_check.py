"""What a front end asks of the process that compares a checkpoint with transformers' model, before a worker starts."""

from __future__ import annotations

import msgspec

from ringcore.checkpoint import ModelFiles, TransformersSpec
from ringcore.checkpoint.mtp_head import AnyHeadSpec

__all__ = ["CHANNEL", "ENTRY", "FolderCheckStart"]

ENTRY = "ringcore.model_executor.models.lean_programs:check_folder"
CHANNEL = "channel"  # of `protocol.job_channel`: its only message is the error, or that there is none


class FolderCheckStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The payload. head: that drafts for the model; a layer of multi-token prediction is in the same files."""

    spec: TransformersSpec
    files: ModelFiles
    head: AnyHeadSpec | None = None
