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
from ringcore.model_executor.models.transformers.fusion.sample_pass import Heads, NotRecognised, SamplePass
from ringcore.model_executor.models.transformers.fusion.trial import Trial, agree
from ringcore.model_executor.models.transformers.handed_down import given_to_body
from ringcore.model_executor.models.transformers.refusal import in_one_line

__all__ = ["check_body"]

_TOLERANCE = 1e-2  # of the largest error against the root mean square, after the errors of all layers


@dataclass(slots=True)
class _SampleForward(ForwardPass):
    """Also for attention that is the model's own."""

    heads: dict[nn.Module, Heads] = field(default_factory=dict)


def check_body(sample: SamplePass, trial: Trial, found: Recognised, calls: Sequence[AttentionCall]) -> None:
    """Fuses the sample's body, of which nothing else can be tried afterwards. Raises `NotRecognised` where it computes
    something else then."""
    whole = sample.calls[-1]
    fused = fuse(sample.body, found, calls, trial.parts, lambda index, plan: trial.index_of(plan))
    try:
        trial.bind(fused.weighted())
        fused.bind_device(torch.device("cpu"))
        rotations = [trial.rotation(plan, head_size) for plan, head_size in fused.rotaries]
        given = _SampleForward(trial.context(), {}, rotations)
        with torch.no_grad():
            anew = given_to_body(given, in_mask="attention_mask" in whole.kwargs)
            out = sample.body(*whole.args, **{**whole.kwargs, **anew})
    except Exception as error:  # whatever the model's own code raises, which may read more of a part than its result
        raise NotRecognised(f"its body fails with our layers in it: {in_one_line(error)}") from error
    ours, theirs = out.last_hidden_state[0], whole.output.last_hidden_state[0]
    if not agree(ours, theirs, _TOLERANCE):
        raise NotRecognised("its layers are recognised, but between them it computes something else")
