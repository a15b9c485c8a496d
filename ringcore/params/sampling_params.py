"""The sampling parameters of a request, validated on construction."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import wraps
from typing import Any, Literal, get_args

from ringcore.params.field_checks import (
    MAX_COUNT,
    bad_field,
    check_int,
    check_list,
    check_number,
    check_plain_data,
    check_text,
)
from ringcore.params.structured_outputs import StructuredOutputsParams
from ringcore.params.vllm_names import SAMPLING_PARAMETERS, known_options

__all__ = ["OutputKind", "Pooling", "RequestOutputKind", "SamplingParams"]

OutputKind = Literal["cumulative", "delta", "final"]
Pooling = Literal["last", "mean"]
_OUTPUT_KINDS, _POOLINGS = get_args(OutputKind), get_args(Pooling)


class RequestOutputKind(StrEnum):
    """The kinds under vLLM's names; `output_kind` takes them or the strings."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final"


MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_N = 64
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-5, 1e5
MAX_LOGIT_BIAS_TOKENS = 1024
MAX_LOGIT_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_EXTRA_ARGS_SIZE = 65_536
MAX_EXTRA_ARGS_DEPTH = 16
MIN_TEMPERATURE = 1e-5
MAX_NUMBER = 1e9
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a completion ends.

    The order of operations on a row of logits, in float32: log-probabilities are of the raw logits; then `logit_bias`
    is added; `repetition_penalty` r makes x / r of x > 0 and x * r of any other, for tokens in prompt or completion;
    `frequency_penalty` is subtracted as often as the completion has the token, `presence_penalty` once if it does;
    custom logits processors; tokens masked by `allowed_token_ids`, `bad_words`, `structured_outputs` and, for stop
    tokens, `min_tokens` become -inf; then temperature, top_k, top_p, min_p, and sampling. `temperature=0` is greedy and
    ignores these filters.

    temperature: how far sampling strays from the most likely token: 0 takes that one, else 1e-5 and above.
    top_k: the number of most likely tokens kept; 0 keeps all, and so does -1, which becomes 0.
    top_p: the smallest set of most likely tokens whose probability reaches this, in (0, 1].
    min_p: tokens at least this times as likely as the best one are kept, in [0, 1].
    presence_penalty: subtracted from the logits of tokens that were generated, from -2 to 2.
    frequency_penalty: subtracted from them once per occurrence, from -2 to 2.
    repetition_penalty: divides positive logits and multiplies others of tokens in prompt or completion; up to 100,000.
    logit_bias: by token id, what is added to its logit, from -100 to 100; at most 1,024 tokens.
    allowed_token_ids: the only tokens that are sampled.
    bad_words: strings that are not generated, with or without a leading space; at most 64 of 1 to 256 characters.
    structured_outputs: the grammar of the completion; needs min_tokens=0 and ignore_eos=False.
    extra_args: for custom logits processors: plain data, at most 65,536 characters and values in all.
    seed: a seeded request samples the same tokens alone, in any batch and after a preemption. Of 64 bits, signed; a
        negative one becomes seed + 2**63, and -1 is none.
    max_tokens: the most tokens to generate; None means up to the engine's max_model_len.
    min_tokens: no stop token or stop string ends the completion before this many tokens.
    stop: strings that end the completion; cut from the text unless `include_stop_str_in_output`.
    include_stop_str_in_output: the text keeps the stop string that ended it.
    stop_token_ids: token ids that end the completion, besides the model's end-of-text tokens.
    ignore_eos: continue past the model's end-of-text token.
    logprobs: the number of most likely tokens to report with each sampled one, -1 for the vocabulary; None for none.
    prompt_logprobs: as `logprobs`, for each prompt token except the first; nothing is read from the prefix cache.
    pooling: report the prompt's hidden states after the final norm, pooled: "last" those of the last token, "mean" the
        mean over all tokens, for which nothing is read from the prefix cache.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: False makes no text, and takes no stop strings.
    n: completions of each prompt; with a seed, completion i has seed + i. Front ends make n, `EngineCore` one.
    output_kind: of a stream: "cumulative" all so far, "delta" what is new, "final" one output at the end.

    Raises `InvalidRequestError` naming field, value and remedy; an unknown keyword is `UnknownOptionError`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    extra_args: dict[str, Any] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: Pooling | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    n: int = 1
    output_kind: OutputKind = "cumulative"

    def __post_init__(self) -> None:
        self._check_filters()
        self._check_penalties()
        self._check_tokens()
        self._check_lengths()
        self._check_stops()
        self._check_outputs()

    def _check_filters(self) -> None:
        check_number("temperature", self.temperature, 0, MAX_NUMBER, "0 is greedy")
        if self.temperature != 0 and self.temperature < MIN_TEMPERATURE:
            raise bad_field("temperature", self.temperature, f"give 0 (greedy) or at least {MIN_TEMPERATURE}")
        check_number("top_p", self.top_p, 0, 1, "1 keeps every token")
        if self.top_p == 0:
            raise bad_field("top_p", self.top_p, "give a number above 0 and at most 1 (1 keeps every token)")
        check_number("min_p", self.min_p, 0, 1, "0 keeps every token")
        check_int("top_k", self.top_k, -1, MAX_COUNT, "0 keeps every token")
        if self.seed is not None:
            check_int("seed", self.seed, MIN_SEED, MAX_SEED, "None draws one")
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)  # frozen for others
        if self.seed is not None and self.seed < 0:
            object.__setattr__(self, "seed", None if self.seed == -1 else self.seed - MIN_SEED)

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY, "0 is none")
        remedy = "1 is none"
        check_number(
            "repetition_penalty", self.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, remedy
        )
        if self.extra_args is not None:
            size, depth = MAX_EXTRA_ARGS_SIZE, MAX_EXTRA_ARGS_DEPTH
            check_plain_data("extra_args", self.extra_args, max_size=size, max_depth=depth, finite=False)

    def _check_tokens(self) -> None:
        """Fields about single tokens and words; the scheduler's vocabulary checks whether the model has them."""
        if self.logit_bias is not None:
            bias = self.logit_bias
            if not isinstance(bias, dict) or len(bias) > MAX_LOGIT_BIAS_TOKENS:
                shown = len(bias) if isinstance(bias, dict) else bias
                raise bad_field("logit_bias", shown, f"give a dict of at most {MAX_LOGIT_BIAS_TOKENS} token ids")
            for token_id, value in bias.items():
                check_int("logit_bias", token_id, 0, MAX_COUNT, "a token id of the model's vocabulary")
                check_number("logit_bias", value, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "it is added to the token's logit")
        if self.allowed_token_ids is not None:
            remedy = "token ids that may be sampled; None allows all"
            for token_id in check_list("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS, remedy):
                check_int("allowed_token_ids", token_id, 0, MAX_COUNT, "a token id of the model's vocabulary")
        if self.bad_words is not None:
            for word in check_list("bad_words", self.bad_words, MAX_BAD_WORDS, "each is a string; None for none"):
                check_text("bad_words", word, MAX_BAD_WORD_CHARS, "a bad word")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, MAX_COUNT, "None means up to max_model_len")
        check_int("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_COUNT, "at most max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), -1, MAX_COUNT, "-1 reports the whole vocabulary, None none")

    def _check_stops(self) -> None:
        if self.stop is not None:
            self._check_stop_strings()
        if self.stop_token_ids is not None:
            self._check_stop_token_ids(self.stop_token_ids)

    def _check_stop_strings(self) -> None:
        if not isinstance(self.stop, str | list | tuple):
            raise bad_field("stop", self.stop, "give a string, or a list of strings")
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise bad_field("stop", len(stops), f"give at most {MAX_STOP_STRINGS} stop strings")
        for text in stops:
            check_text("stop", text, MAX_STOP_STRING_CHARS, "a stop string")

    def _check_stop_token_ids(self, ids: object) -> None:
        if not isinstance(ids, list | tuple):
            raise bad_field("stop_token_ids", ids, "give a list of token ids")
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise bad_field("stop_token_ids", len(ids), f"give at most {MAX_STOP_TOKEN_IDS} stop token ids")
        for token_id in ids:
            check_int("stop_token_ids", token_id, 0, MAX_COUNT, "a token id of the model's vocabulary")

    def _check_outputs(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise bad_field(name, getattr(self, name), "give True or False")
        if not self.detokenize and self.stop_strings:
            raise bad_field(
                "detokenize", False, "give True: stop strings are found in the text; or give stop_token_ids instead"
            )
        check_int("n", self.n, 1, MAX_N, "each is a completion of its own")
        if self.seed is not None and self.seed + self.n - 1 > MAX_SEED:
            raise bad_field("seed", self.seed, f"give at most {MAX_SEED - self.n + 1}; completion i of n has seed + i")
        if not isinstance(self.output_kind, str) or self.output_kind not in _OUTPUT_KINDS:
            raise bad_field("output_kind", self.output_kind, f"give one of {', '.join(_OUTPUT_KINDS)}")
        if type(self.output_kind) is not str:  # of a RequestOutputKind
            object.__setattr__(self, "output_kind", str(self.output_kind))
        if self.pooling is not None and (not isinstance(self.pooling, str) or self.pooling not in _POOLINGS):
            raise bad_field("pooling", self.pooling, f"give one of {', '.join(_POOLINGS)}")
        if self.structured_outputs is not None:
            self._check_structured_outputs()

    def _check_structured_outputs(self) -> None:
        """The grammar alone decides when a completion may or must end."""
        if not isinstance(self.structured_outputs, StructuredOutputsParams):
            raise bad_field("structured_outputs", self.structured_outputs, "give a StructuredOutputsParams")
        if self.min_tokens:
            raise bad_field("min_tokens", self.min_tokens, "give 0 with structured_outputs, which say when it may end")
        if self.ignore_eos:
            raise bad_field("ignore_eos", True, "give False with structured_outputs, which say when it has to end")

    def clone(self) -> SamplingParams:
        """A copy. It may be shared as well: nothing of it changes."""
        return replace(self)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)


def _reject_unknown_options() -> None:
    """Replaces Python's TypeError for an unknown keyword by an error that says what to write instead."""
    names = {f.name for f in fields(SamplingParams)}
    generated = SamplingParams.__init__

    @wraps(generated)
    def init(self: SamplingParams, **options: Any) -> None:
        generated(self, **known_options(options, names, SAMPLING_PARAMETERS, "sampling parameter"))

    SamplingParams.__init__ = init  # type: ignore[method-assign]


_reject_unknown_options()
