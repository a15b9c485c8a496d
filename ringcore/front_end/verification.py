"""Whether an engine computes what transformers computes, and whether what it draws depends on the model alone."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringcore.checkpoint.tokenizer import load_tokenizer
from ringcore.config import EngineConfig
from ringcore.config.value_checks import bad_value
from ringcore.errors import ModelLoadError
from ringcore.front_end.llm import LLM
from ringcore.params.outputs import RequestOutput
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.finding import Finding

__all__ = ["Reference", "chi_squared_z", "compare_logprobs", "compare_tokens", "verify"]

_PROGRAM = (sys.executable, "-m", "ringcore.model_executor.reference")
_LONG = "A river that floods every spring leaves fields behind; a late farmer counts fewer sacks in autumn. " * 8
_TEXTS = ("The capital of France is", "def fibonacci(n):\n    ", "1, 2, 3, 4, 5,", _LONG)
_NUM_TOKENS = 24
_NUM_DRAWS = 1024
_MAX_Z = 4.0  # of a sampler that is right, one of 30,000 sets of draws is beyond
_CHUNK = 16  # tokens of a prompt in a step, of the engine that takes the prompts in pieces
# By the dtype: below which gap of the best two logits their order says nothing, and how far log-probabilities may be.
_TOLERANCES = {"float32": (0.001, 0.002), "float16": (0.1, 0.1), "bfloat16": (0.5, 0.5)}


@dataclass(frozen=True)
class Reference:
    """Of one prompt. gaps: between the best two logits of each step."""

    token_ids: list[int]
    logprobs: list[float]
    gaps: list[float]

    def num_decided(self, min_gap: float) -> int:
        """Steps before the first that another order of additions may decide otherwise."""
        return next((i for i, gap in enumerate(self.gaps) if gap < min_gap), len(self.gaps))


def verify(model: str, engine_options: Mapping[str, Any], reference_timeout_s: float) -> Iterator[Finding]:
    """A finding for each check, as it is made. Raises `RingcoreError` where the engine does not start, and
    `ModelLoadError` where transformers does not load the model."""
    options = {"dtype": "float32", "load_format": "safetensors", **engine_options}
    config = EngineConfig.from_options(model=model, **options)
    if options["dtype"] not in _TOLERANCES:
        raise bad_value("dtype", options["dtype"], f"give one of {', '.join(_TOLERANCES)}")
    min_gap, max_error = _TOLERANCES[options["dtype"]]
    tokenizer = load_tokenizer(config.model.files)
    longest = max(1, config.model.context_len - _NUM_TOKENS)
    prompts = [tokenizer.encode(text)[:longest] for text in _TEXTS]
    references = _references(config, options["dtype"], prompts, reference_timeout_s)
    decided = [one.num_decided(min_gap) for one in references]
    greedy = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True, logprobs=0)
    with LLM(model, **options) as llm:
        together = llm.generate(prompts, greedy, use_tqdm=False)
        yield compare_tokens("tokens", references, decided, _tokens(together), "transformers'")
        yield compare_logprobs(references, decided, together, max_error)
        again = [llm.generate([prompt], greedy, use_tqdm=False)[0] for prompt in prompts]
        yield compare_tokens("batch", references, decided, _tokens(again), "transformers', alone and from the cache")
        yield _sampling(llm, prompts[0][:2])
    pieces = {"long_prefill_token_threshold": _CHUNK, "enable_prefix_caching": False, "steps_in_flight": 1}
    with LLM(model, **options | pieces) as llm:
        chunked = llm.generate(prompts, greedy, use_tqdm=False)
        what = f"transformers', with prompts in chunks of {_CHUNK} tokens and one step in flight"
        yield compare_tokens("chunks", references, decided, _tokens(chunked), what)


def _references(config: EngineConfig, dtype: str, prompts: list[list[int]], timeout_s: float) -> list[Reference]:
    job = {"folder": config.model.files.path, "dtype": dtype, "prompts": prompts, "num_tokens": _NUM_TOKENS}
    ends_with_this, held = os.pipe()  # the program ends when nothing holds the other end any more
    try:
        done = subprocess.run(
            [*_PROGRAM, str(ends_with_this)],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            pass_fds=(ends_with_this,),
        )
    except subprocess.TimeoutExpired as error:
        remedy = "transformers has not finished within it; raise it, or take a GPU"
        raise bad_value("reference_timeout_s", timeout_s, remedy) from error
    finally:
        os.close(ends_with_this)
        os.close(held)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ModelLoadError(f"{config.model.files.path}: transformers cannot run it: {said}", path=config.model.model)
    return [Reference(**json.loads(line)) for line in done.stdout.splitlines()]


def _tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare_tokens(
    check: str, references: Sequence[Reference], decided: Sequence[int], token_ids: list[list[int]], what: str
) -> Finding:
    """decided: how many tokens of each are compared."""
    for index, (reference, num, got) in enumerate(zip(references, decided, token_ids, strict=True)):
        for step in range(num):
            if got[step : step + 1] != reference.token_ids[step : step + 1]:
                told = f"{got[step : step + 1]} is not {reference.token_ids[step]}"
                wrong = f"prompt {index}, token {step}: {told}; the best logits are {reference.gaps[step]:.3g} apart"
                return Finding(check, "error", wrong, "compare the layers of this model with transformers'")
    total, compared = sum(len(one.token_ids) for one in references), sum(decided)
    undecided = f"; {total - compared} came after a near tie" if compared < total else ""
    return Finding(check, "ok", f"{compared} greedy tokens of {len(references)} prompts are {what}{undecided}")


def compare_logprobs(
    references: Sequence[Reference], decided: Sequence[int], outputs: Sequence[RequestOutput], max_error: float
) -> Finding:
    error = 0.0
    for reference, num, output in zip(references, decided, outputs, strict=True):
        completion = output.outputs[0]
        for step in range(min(num, len(completion.token_ids))):
            ours = (completion.logprobs or [])[step][completion.token_ids[step]].logprob
            error = max(error, abs(ours - reference.logprobs[step]))
    found = f"log-probabilities differ from transformers' by {error:.2g} at most"
    if error <= max_error:
        return Finding("log-probabilities", "ok", found)
    remedy = "compare the layers of this model with transformers'"
    return Finding("log-probabilities", "error", f"{found}, and {max_error} is allowed", remedy)


def _sampling(llm: LLM, prompt: list[int]) -> Finding:
    """Draws with seeds, against the probabilities that the engine reports."""
    num_top = 20 if llm.config.scheduler.max_logprobs < 0 else min(20, llm.config.scheduler.max_logprobs)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=num_top), use_tqdm=False)
    (position,) = output.outputs[0].logprobs or [{}]
    probabilities = {token: math.exp(one.logprob) for token, one in position.items()}
    seeds = [SamplingParams(max_tokens=1, seed=seed) for seed in range(_NUM_DRAWS)]
    drawn = [ids[0] for ids in _tokens(llm.generate([prompt] * _NUM_DRAWS, seeds, use_tqdm=False))]
    z = chi_squared_z(Counter(drawn), probabilities)
    found = f"{_NUM_DRAWS} seeded draws: chi-squared is {z:+.1f} standard deviations from what chance gives"
    if z <= _MAX_Z:
        return Finding("sampling", "ok", found)
    return Finding("sampling", "error", f"{found}, and {_MAX_Z} are allowed", "report it with the model and the device")


def chi_squared_z(counts: Mapping[int, int], probabilities: Mapping[int, float]) -> float:
    """Pearson's statistic of draws as a standard normal deviate (Wilson and Hilferty's transformation). Outcomes that
    are expected less than 5 times, and those without a probability here, are one outcome. -inf where only one is left.
    """
    total = sum(counts.values())
    kept = {outcome: p for outcome, p in probabilities.items() if p * total >= 5}
    bins = [(counts.get(outcome, 0), p * total) for outcome, p in kept.items()]
    rest = total - sum(expected for _, expected in bins)
    if rest >= 5:
        bins.append((total - sum(count for count, _ in bins), rest))
    freedom = len(bins) - 1
    if freedom < 1:
        return -math.inf
    statistic = sum((count - expected) ** 2 / expected for count, expected in bins)
    spread = 2 / (9 * freedom)
    return (math.cbrt(statistic / freedom) - (1 - spread)) / math.sqrt(spread)
