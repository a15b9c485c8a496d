"""What an engine generates with a saved model, compared with what transformers did; and the control of that."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from engine import generate, make_core, tokens
from reference import Entry, differences
from transformers_models import NEW_TOKENS, Saved, are_decisive, write_config

from ringcore import EngineCore, SamplingParams
from ringcore.errors import ModelLoadError

__all__ = ["GREEDY", "assert_equal", "refusal"]

GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
_WITH_LOGPROBS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
# By how much log-probabilities of the right run and of the one with wrong boundaries differ from the reference.
_MAX_ERROR, _MIN_CONTROL, _MIN_RATIO = 0.002, 0.1, 1000


@functools.cache
def refusal(model_type: str, folder: Path, **options: Any) -> str:
    """The error with which an engine refuses to start with the type's tiny configuration, in a folder that is called as
    the type; "" if it starts."""
    path = folder / "configurations" / model_type
    try:
        make_core(write_config(model_type, path), **options | {"load_format": "dummy"}).shutdown()
    except ModelLoadError as error:
        return str(error).replace(str(path), model_type)
    return ""


def assert_equal(model: Saved, core: EngineCore) -> dict[str, float]:
    """With an empty cache and again. -> the largest difference of a log-probability, and that of the control, where
    transformers itself runs with wrong boundaries of sequences: without it, a test could not tell whether this model
    ever looks at another token."""
    entries = model.entries
    assert are_decisive(entries)
    prompts = [entry.prompt_token_ids for entry in entries]
    cold = generate(core, prompts, _WITH_LOGPROBS)
    assert differences(entries, tokens(cold)) == [], "cold"
    assert differences(entries, tokens(generate(core, prompts, GREEDY))) == [], "warm"
    logprobs = [[one.logprobs[0] for output in outputs for one in output.logprobs] for outputs in cold]
    error, control = (_largest_difference(entries, one) for one in (logprobs, model.mixed))
    assert error < _MAX_ERROR
    assert control > max(_MIN_CONTROL, _MIN_RATIO * error), "sequences that are mixed would not be seen"
    return {"error": error, "control": control}


def _largest_difference(entries: list[Entry], logprobs: list[list[float]]) -> float:
    """Of log-probabilities of the same tokens: before the first that the reference nearly decided otherwise."""
    found = [0.0]
    for entry, got in zip(entries, logprobs, strict=True):
        assert entry.logprobs is not None
        pairs = list(zip(entry.logprobs, got, strict=True))[: entry.num_decisive]
        found += [abs(theirs - ours) for theirs, ours in pairs]
    return max(found)
