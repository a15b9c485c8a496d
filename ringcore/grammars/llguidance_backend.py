"""The llguidance backend: a lazy lexer by regular expression derivatives and an Earley parser; microseconds per
mask."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

from ringcore.grammars.backend import Backend, any_of, schema_of
from ringcore.grammars.json_schemas import LLGUIDANCE_OPTIONS, normalized_schema
from ringcore.grammars.regular_expressions import fullmatch_regex, write_regex
from ringcore.grammars.vocabulary import Vocabulary
from ringcore.params.structured_outputs import StructuredOutputsParams, spec_error

__all__ = ["LLGuidanceBackend"]

_MAX_THREADS = 4
# The library's defaults, except max_lexer_states: a state takes one to two kilobytes.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,  # they contain the whole grammar
)


class LLGuidanceBackend(Backend):
    """The constructor holds the GIL for 0.2 s (vocabulary of 50,000) to 0.5 s (150,000); compiling releases it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        eos = vocabulary.eos_token_ids[0]
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=len(vocabulary.tokens), eos_token=eos)
        self._executor: llguidance.LLExecutor | None = None

    def compile(self, spec: StructuredOutputsParams) -> llguidance.LLMatcher:
        try:
            grammar = _grammar(spec)
        except (ValueError, RecursionError) as error:
            raise spec_error(spec, str(error)) from error
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, limits=_LIMITS, log_level=0)
        if not matcher.is_error():
            first = matcher.deep_copy()
            first.compute_bitmask()
            if not first.is_error():
                return matcher
            if not first.get_error().startswith("NoExtension"):
                raise spec_error(spec, first.get_error())
            raise spec_error(spec, "no text at all satisfies it")
        raise spec_error(spec, matcher.get_error())

    def begin(self, compiled: llguidance.LLMatcher) -> _LLGuidanceProgress:
        return _LLGuidanceProgress(compiled.deep_copy())

    def fill(self, parts: Sequence[tuple[int, _LLGuidanceProgress]], masks: np.ndarray) -> None:
        if len(parts) == 1:
            row, progress = parts[0]
            fill_next_token_bitmask(progress.matcher, masks, row)
            return
        if self._executor is None:
            self._executor = llguidance.LLExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        fill_next_token_bitmask_par(self._executor, [(progress.matcher, row) for row, progress in parts], masks)


class _LLGuidanceProgress:
    """`Progress` of an LLMatcher."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self.matcher.consume_token(token_id))

    def can_end(self) -> bool:
        return not self.matcher.is_error() and (self.matcher.is_accepting() or self.matcher.is_stopped())

    def must_end(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    def failure(self) -> str | None:
        return self.matcher.get_error() if self.matcher.is_error() else None


class _Tokens:
    """The vocabulary in llguidance's interface. Called, it tokenizes text that the grammar forces, in the model's
    canonical tokenization; then only these tokens are in the mask, so they must decode to exactly that text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self._encode = vocabulary.encode
        special = set(vocabulary.special_ids)
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: bytes) -> list[int]:
        ids = self._encode(text.decode())
        if all(i < len(self.tokens) for i in ids) and b"".join(self.tokens[i] for i in ids) == text:
            return ids
        return list(self._greedy(text))  # SentencePiece puts a space before it

    def _greedy(self, text: bytes) -> Iterator[int]:
        """The longest token first."""
        at = 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            end = next((end for end in ends if text[at:end] in self._ids), None)
            if end is None:
                return  # no token starts with this byte: the rest is left to the mask
            yield self._ids[text[at:end]]
            at = end


def _grammar(spec: StructuredOutputsParams) -> str:
    """In llguidance's format. Raises ValueError."""
    make = llguidance.LLMatcher
    match spec.kind:
        case "json" | "json_object":
            options: Any = dict(LLGUIDANCE_OPTIONS)  # a JsonCompileOptions, which exists for type checkers only
            return make.grammar_from_json_schema(json.dumps(normalized_schema(schema_of(spec))), overrides=options)
        case "regex":
            assert spec.regex is not None
            return make.grammar_from_lark(f"start: /(?:{write_regex(fullmatch_regex(spec.regex))})/")
        case "choice":
            assert spec.choice is not None
            return make.grammar_from_lark(f"start: {any_of(spec.choice)}")
        case "grammar":
            assert spec.grammar is not None
            return llguidance.grammar_from("grammar", spec.grammar)
