"""The whole body with our parts in it, compared with the sample pass: also what is between the layers counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from ringcore.model_executor.models.transformers.attention_calls import AttentionCall
from ringcore.model_executor.models.transformers.fusion.forward_pass import ForwardPass
from ringcore.model_executor.models.transformers.fusion.fused_body import fuse
from ringcore.model_executor.models.transformers.fusion.recognised import Recognised
from ringcore.model_executor.models.transformers.fusion.sample_pass import Heads, SamplePass
from ringcore.model_executor.models.transformers.fusion.trial import Trial, agree

__all__ = ["body_agrees"]

_TOLERANCE = 1e-2  # of the largest error against the root mean square, after the errors of all layers


@dataclass(slots=True)
class _SampleForward(ForwardPass):
    """Also for attention that is the model's own."""

    heads: dict[nn.Module, Heads] = field(default_factory=dict)


def body_agrees(sample: SamplePass, trial: Trial, found: Recognised, calls: Sequence[AttentionCall]) -> bool:
    """Fuses the sample's body, of which nothing else can be tried afterwards."""
    whole = sample.calls[-1]
    fused = fuse(sample.body, found, calls, trial.parts, lambda index: 0)
    try:
        trial.bind(fused.weighted())
        fused.bind_device(torch.device("cpu"))
        rotations = [trial.rotation(plan, head_size) for plan, head_size in fused.rotaries]
        given = _SampleForward(trial.context(), {}, rotations)
        with torch.no_grad():
            out = sample.body(*whole.args, **{**whole.kwargs, "ringcore": given})
    except (
        Exception
    ):  # whatever the model's own code raises where it reads more of a part than its result, or never runs a part
        return False
    ours, theirs = out.last_hidden_state[0], whole.output.last_hidden_state[0]
    return agree(ours, theirs, _TOLERANCE)
