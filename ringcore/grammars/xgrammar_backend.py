"""The xgrammar backend: pushdown automata with masks precomputed at compile time."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import xgrammar

from ringcore.errors import InvalidRequestError
from ringcore.grammars.backend import Backend, any_of, schema_of
from ringcore.grammars.json_schemas import normalized_schema
from ringcore.grammars.regular_expressions import fullmatch_regex
from ringcore.grammars.vocabulary import Vocabulary
from ringcore.grammars.xgrammar_json import json_grammar
from ringcore.grammars.xgrammar_keywords import unsupported_keyword, with_string_patterns
from ringcore.grammars.xgrammar_regex import write_gbnf
from ringcore.params.structured_outputs import StructuredOutputsParams, spec_error

__all__ = ["XGrammarBackend"]

_MAX_RECURSION = 2_000  # of its parsers and compilers; the default needs a larger stack
_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")  # "[12:00:00] /project/cpp/parser.cc:83: ", the prefix of its messages
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*:)", re.MULTILINE)  # a grammar in Lark's syntax has a rule `start`

_JSON_IN_LARK = re.compile(r"%json\b")  # xgrammar accepts it, but ignores constraints silently


class XGrammarBackend(Backend):
    """The constructor holds the GIL for 0.05 to 0.15 s, depending on the vocabulary; compiling releases it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens, eos = list(vocabulary.tokens), vocabulary.eos_token_ids[0]
        for token_id in vocabulary.special_ids:
            tokens[token_id] = b""
        self._eos = eos
        xgrammar.set_max_recursion_depth(_MAX_RECURSION)
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[eos], add_prefix_space=False
        )
        # `Grammars` is the cache. One thread: the other cores execute steps.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        bits = np.zeros(-(-len(tokens) // 32) * 32, np.uint8)
        bits[[i for i, token in enumerate(tokens) if token or i == eos]] = 1
        self._known = np.packbits(bits, bitorder="little").view(np.int32)

    def compile(self, spec: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
        try:
            compiled = self._compile(spec)
            first = np.zeros((1, len(self._known)), np.int32)
            self.fill([(0, self.begin(compiled))], first)
        except InvalidRequestError:
            raise
        except (RuntimeError, ValueError, RecursionError) as error:
            raise spec_error(spec, _PLACE.sub("", str(error))) from error
        if not first.any():
            raise spec_error(spec, "no text at all satisfies it")
        return compiled

    def _compile(self, spec: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
        match spec.kind:
            case "json" | "json_object":
                return self._compiler.compile_grammar(_json(spec))
            case "regex":
                return self._compiler.compile_grammar(f"root ::= {_regex(spec)}")
            case "choice":
                assert spec.choice is not None
                return self._compiler.compile_grammar(f"root ::= {any_of(spec.choice)}")
            case "grammar":
                assert spec.grammar is not None
                if _JSON_IN_LARK.search(spec.grammar):
                    raise _unsupported(spec, "%json in a grammar")
                if _LARK.search(spec.grammar):
                    return self._compiler.compile_lark(spec.grammar)
                return self._compiler.compile_grammar(spec.grammar)

    def begin(self, compiled: xgrammar.CompiledGrammar) -> _XGrammarProgress:
        return _XGrammarProgress(xgrammar.GrammarMatcher(compiled), self._known, self._eos)

    def fill(self, parts: Sequence[tuple[int, _XGrammarProgress]], masks: np.ndarray) -> None:
        """Sequential: starting the library's threads takes longer than filling a mask."""
        for row, progress in parts:
            progress.fill(masks, row)


def _json(spec: StructuredOutputsParams) -> str:
    """Raises ValueError, and `InvalidRequestError` for what only this library cannot enforce."""
    schema = schema_of(spec)
    normalized = normalized_schema(schema)
    if (keyword := unsupported_keyword(schema)) is not None:
        raise _unsupported(spec, keyword)
    try:
        rewritten = with_string_patterns(normalized)
    except ValueError as error:
        raise _unsupported(spec, str(error)) from error
    # json_object: an object without declared properties may have any.
    return json_grammar(rewritten, is_open=spec.json is None)


def _regex(spec: StructuredOutputsParams) -> str:
    assert spec.regex is not None
    node = fullmatch_regex(spec.regex)
    try:
        return write_gbnf(node)
    except ValueError as error:
        raise _unsupported(spec, str(error)) from error


def _unsupported(spec: StructuredOutputsParams, what: str) -> InvalidRequestError:
    return spec_error(spec, f"xgrammar cannot enforce {what}; structured_outputs_backend='llguidance' may")


class _XGrammarProgress:
    """`Progress` of a GrammarMatcher. known: the bitmask [ceil(vocab_size / 32)] of all tokens of text, and `eos`."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, known: np.ndarray, eos: int) -> None:
        self._matcher, self._known, self._eos = matcher, known, eos

    def fill(self, masks: np.ndarray, row: int) -> None:
        masks[row] = -1  # xgrammar leaves a row unwritten where every token is allowed
        self._matcher.fill_next_token_bitmask(masks, row)
        masks[row] &= self._known

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def can_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def must_end(self) -> bool:
        if not self.can_end():
            return False
        mask = np.empty((1, len(self._known)), np.int32)
        self.fill(mask, 0)
        mask.view(np.uint32)[0, self._eos // 32] &= ~np.uint32(1 << self._eos % 32)
        return not mask.any()

    def failure(self) -> str | None:
        return None
