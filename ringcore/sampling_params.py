"""What the user wants of sampling, checked where it is written."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Literal, get_args

from ringcore.errors import InvalidRequestError, unknown_option

__all__ = ["OutputKind", "SamplingParams"]

OutputKind = Literal["cumulative", "delta", "final"]

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MAX_N = 64
MIN_TEMPERATURE = 1e-5
MAX_NUMBER = 1e9
MAX_COUNT = 2**31 - 1  # what the workers' columns hold
MAX_SEED = 2**63 - 1


def _bad(field: str, value: object, remedy: str) -> InvalidRequestError:
    sendable = isinstance(value, str | float | None) or (isinstance(value, int) and abs(value) < 2**63)
    shown = value if sendable else repr(value)
    return InvalidRequestError(f"{field}={value!r}: {remedy}", field=field, value=shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a completion ends.

    The order of operations on a row of logits: `min_tokens` bars the stop tokens, then temperature, top_k,
    top_p, min_p, then one draw. `temperature=0` is greedy and ignores the filters. `logprobs` are of the raw
    distribution, before any of it.

    temperature: 0, or 1e-5 and above.
    top_k: the number of most likely tokens kept; 0 keeps all.
    top_p: the smallest set of most likely tokens whose probability reaches this, in (0, 1].
    min_p: tokens at least this times as likely as the best one are kept, in [0, 1].
    seed: a seeded request draws the same tokens alone, in any batch and after a preemption.
    max_tokens: the most tokens to generate; None means up to the engine's max_model_len.
    min_tokens: no stop token or stop string ends the completion before this many tokens.
    stop: strings that end the completion; cut from the text unless `include_stop_str_in_output`.
    stop_token_ids: token ids that end the completion, beside the model's own end of text.
    ignore_eos: go on past the model's end-of-text token.
    logprobs: None for none, else the number of most likely tokens to report beside the sampled one.
    skip_special_tokens: leave special tokens out of the text.
    n: completions of each prompt; with a seed, completion i has seed + i. Front ends make them, `EngineCore` makes one.
    output_kind: what a stream gives: "cumulative" all so far, "delta" what is new, "final" one output at the end.

    Raises `InvalidRequestError` naming field, value and remedy; an unknown keyword is `UnknownOptionError`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    n: int = 1
    output_kind: OutputKind = "cumulative"

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lengths()
        self._check_stops()
        self._check_outputs()

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:  # NaN too
                raise _bad(name, value, f"give a finite number, at most {MAX_NUMBER:g}")
        if self.temperature != 0 and self.temperature < MIN_TEMPERATURE:
            raise _bad("temperature", self.temperature, f"give 0 (greedy) or at least {MIN_TEMPERATURE}")
        if not 0 < self.top_p <= 1:
            raise _bad("top_p", self.top_p, "give a number above 0 and at most 1 (1 keeps every token)")
        if not 0 <= self.min_p <= 1:
            raise _bad("min_p", self.min_p, "give a number from 0 to 1 (0 keeps every token)")
        _check_int("top_k", self.top_k, 0, MAX_COUNT, "0 keeps every token")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED, "None draws one")

    def _check_lengths(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_COUNT, "None means up to max_model_len")
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens or MAX_COUNT, "at most max_tokens")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS, "None reports none")

    def _check_stops(self) -> None:
        stops = self.stop_strings
        if len(stops) > MAX_STOP_STRINGS:
            raise _bad("stop", len(stops), f"give at most {MAX_STOP_STRINGS} stop strings")
        for text in stops:
            if not isinstance(text, str) or not text or len(text) > MAX_STOP_STRING_CHARS:
                raise _bad("stop", text, f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters")
            if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
                shown = text.encode(errors="replace").decode()
                raise _bad("stop", shown, "a surrogate stands for half a character; remove it")
        ids = self.stop_token_ids or []
        if len(ids) > MAX_STOP_TOKEN_IDS:
            raise _bad("stop_token_ids", len(ids), f"give at most {MAX_STOP_TOKEN_IDS} stop token ids")
        for token_id in ids:
            _check_int("stop_token_ids", token_id, 0, MAX_COUNT, "a token id of the model's vocabulary")

    def _check_outputs(self) -> None:
        _check_int("n", self.n, 1, MAX_N, "each is a completion of its own")
        if self.seed is not None and self.seed + self.n - 1 > MAX_SEED:
            raise _bad("seed", self.seed, f"give at most {MAX_SEED - self.n + 1}; completion i of n has seed + i")
        if self.output_kind not in get_args(OutputKind):
            raise _bad("output_kind", self.output_kind, f"give one of {', '.join(get_args(OutputKind))}")

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _check_int(name: str, value: object, low: int, high: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _bad(name, value, f"give an integer from {low} to {high}; {remedy}")


def _reject_unknown_options() -> None:
    """Makes an unknown keyword an error that names the nearest valid one, in place of Python's own."""
    names = {f.name for f in fields(SamplingParams)}
    generated = SamplingParams.__init__

    @wraps(generated)
    def init(self: SamplingParams, **options: Any) -> None:
        for name in options:
            if name not in names:
                raise unknown_option(name, names, "sampling parameter")
        generated(self, **options)

    SamplingParams.__init__ = init  # type: ignore[method-assign]


_reject_unknown_options()
