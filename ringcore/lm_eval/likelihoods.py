"""Log-likelihoods of continuations, by the log-probabilities of prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.errors import InvalidRequestError
from ringcore.front_end.llm import LLM
from ringcore.front_end.progress import progress_bar
from ringcore.params.outputs import RequestOutput
from ringcore.params.sampling_params import SamplingParams

__all__ = ["log_likelihoods", "longest_scored"]

TokenPair = tuple[Sequence[int], Sequence[int]]  # a context of at least one token, and its continuation
_PARAMS = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)


def longest_scored(llm: LLM) -> int:
    """The most tokens of context and continuation: a request also generates a token."""
    return llm.ready.max_model_len - 1


def log_likelihoods(llm: LLM, pairs: Sequence[TokenPair], use_tqdm: bool = False) -> list[tuple[float, bool]]:
    """For each pair the natural logarithm of the continuation's probability after its context, and whether greedy
    decoding writes it. All pairs are requests of the engine at once, which batches them.

    A context that is too long loses its beginning. Raises `InvalidRequestError`, before anything is computed, for an
    empty context, and for a continuation that leaves no room for a token of context.
    """
    longest = longest_scored(llm)
    prompts = [{"prompt_token_ids": _kept(pair, longest), "request_id": str(i)} for i, pair in enumerate(pairs)]
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    if not pairs:
        return found
    with progress_bar(len(pairs), use_tqdm) as progress:
        for output in llm.stream(prompts, _PARAMS):
            number = int(output.request_id)
            found[number] = _likelihood(output, len(pairs[number][1]))
            progress(1, 1)
    return found


def _kept(pair: TokenPair, longest: int) -> list[int]:
    context, continuation = pair
    if not context:
        raise InvalidRequestError("context: it is empty; give at least one token", field="context")
    if len(continuation) >= longest:
        raise InvalidRequestError(
            f"continuation: it has {len(continuation)} tokens, and with one of context {longest} fit; "
            "raise max_model_len",
            field="continuation",
            value=len(continuation),
        )
    return [*context, *continuation][-longest:]


def _likelihood(output: RequestOutput, num_scored: int) -> tuple[float, bool]:
    """Of the last `num_scored` tokens of the prompt."""
    assert output.prompt_logprobs is not None
    first = len(output.prompt_token_ids) - num_scored
    total, is_greedy = 0.0, True
    for token_id, likeliest in zip(output.prompt_token_ids[first:], output.prompt_logprobs[first:], strict=True):
        assert likeliest is not None, "a context has at least one token"
        total += likeliest[token_id].logprob
        is_greedy &= likeliest[token_id].rank == 1
    return total, is_greedy
