"""The grammars of one worker: compiled once, in an LRU cache, and matched by every completion that uses them.

The worker's side thread compiles while the main thread executes steps. On a cache miss the calling thread compiles the
grammar itself, so that cache contents affect only the time.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ringcore.config import EngineConfig
from ringcore.errors import InvalidRequestError
from ringcore.grammars.backend import Backend, Progress
from ringcore.grammars.vocabulary import Vocabulary, read_vocabulary
from ringcore.params.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from ringcore.checkpoint.tokenizer_files import TokenizerFiles  # which imports tokenizers

__all__ = ["Grammars", "Matcher", "grammar_key", "model_grammars"]

BackendName = Literal["auto", "llguidance", "xgrammar"]
MAX_CACHED = 128  # compiled grammars

_EXTRAS = {"llguidance": "ringcore[structured]", "xgrammar": "ringcore[xgrammar]"}


class Matcher(Protocol):
    """The position of one completion in its grammar. One thread at a time."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Advances by sampled tokens. False: the grammar rejects them, and the row has failed."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether only the model's end-of-text tokens may follow."""
        ...

    @property
    def failure(self) -> str | None:
        """Why matching cannot continue after accepted tokens: a work limit of the library. None if it can."""
        ...


class Grammars:
    """An LRU cache of one model's compiled grammars, and their matchers. Thread-safe.

    The tokenizer is read, and the library imported, on first use.
    """

    def __init__(
        self,
        tokenizer: TokenizerFiles | Callable[[], TokenizerFiles],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        backend: BackendName = "auto",
        max_cached: int = MAX_CACHED,
    ) -> None:
        """tokenizer: the model's, or a callable that reads it. vocab_size: of the logits; ids unknown to the tokenizer
        are masked. eos_token_ids: each may end a completion. backend: "auto" is llguidance if installed, else
        xgrammar."""
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._name, self._max_cached = backend, max_cached
        self._load_lock = threading.Lock()
        self._loaded: tuple[Backend, Vocabulary] | None = None
        self._cache_lock = threading.Lock()
        self._cache: OrderedDict[str, Any] = OrderedDict()  # by `grammar_key`, least recently used first

    def load(self) -> None:
        """Imports the library and reads the vocabulary, once. Raises `InvalidRequestError` where the library is not
        installed or does not support the tokenizer, and `ModelLoadError`."""
        self._load()

    def _load(self) -> tuple[Backend, Vocabulary]:
        with self._load_lock:
            if self._loaded is None:
                name = _installed(self._name)
                files = self._tokenizer() if callable(self._tokenizer) else self._tokenizer
                vocabulary = read_vocabulary(files, self._vocab_size, self._eos_token_ids)
                self._loaded = _make_backend(name, vocabulary), vocabulary
            return self._loaded

    def compile(self, spec: StructuredOutputsParams) -> None:
        """Compiles into the cache. Raises `InvalidRequestError` that names the problem."""
        self._compiled(spec)

    def _compiled(self, spec: StructuredOutputsParams) -> Any:
        key = grammar_key(spec)
        with self._cache_lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        compiled = self._load()[0].compile(spec)
        with self._cache_lock:
            self._cache[key] = compiled
            while len(self._cache) > self._max_cached:
                self._cache.popitem(last=False)
        return compiled

    def matcher(self, spec: StructuredOutputsParams) -> Matcher:
        """A new matcher at the start of a completion. Compiles the grammar on a cache miss; raises as `compile`."""
        compiled = self._compiled(spec)
        backend, vocabulary = self._load()
        return _Matcher(backend.begin(compiled), frozenset(vocabulary.eos_token_ids))

    def fill_bitmasks(self, matchers: Sequence[Any], masks: np.ndarray) -> None:
        """Writes token bitmasks: row i of masks [k, ceil(vocab_size / 32)] int32, C-contiguous, for `matchers[i]`,
        which `matcher` created. Bit t % 32 of word t // 32 is set if token t is allowed. The row of a matcher with a
        `failure` is zero.
        """
        if not matchers:
            return
        backend, vocabulary = self._load()
        num_words = -(-len(vocabulary.tokens) // 32)
        assert masks.shape == (len(matchers), num_words), f"{masks.shape} for {len(matchers)} rows of {num_words} words"
        assert masks.dtype == np.int32, masks.dtype
        assert masks.flags.c_contiguous, "masks must be C-contiguous"
        own = [matcher for matcher in matchers if isinstance(matcher, _Matcher)]
        assert len(own) == len(matchers), "a matcher of another implementation"
        parts = [(row, matcher.progress) for row, matcher in enumerate(own) if not matcher.has_ended]
        if parts:
            backend.fill(parts, masks)
        words = masks.view(np.uint32)
        first = vocabulary.eos_token_ids[0]
        for row, matcher in enumerate(own):
            if matcher.has_ended or matcher.failure is not None:
                words[row] = 0
            may_end = matcher.has_ended or bool(words[row, first // 32] >> (first % 32) & 1)
            if may_end:
                for token_id in vocabulary.eos_token_ids:
                    words[row, token_id // 32] |= np.uint32(1 << token_id % 32)


class _Matcher:
    """A `Matcher` of a backend's `Progress`, which adds the end-of-text tokens."""

    def __init__(self, progress: Progress, eos_token_ids: frozenset[int]) -> None:
        self.progress, self._eos_token_ids = progress, eos_token_ids
        self.has_ended = False
        self._has_failed = False

    def accept(self, token_ids: Sequence[int]) -> bool:
        return all(self._accept(int(token_id)) for token_id in token_ids)

    def _accept(self, token_id: int) -> bool:
        if self._has_failed:
            return False
        is_end = token_id in self._eos_token_ids
        if self.has_ended:
            is_accepted = is_end
        elif is_end:
            is_accepted = self.has_ended = self.progress.can_end()
        else:
            is_accepted = self.progress.accept(token_id)
        self._has_failed = not is_accepted
        return is_accepted

    @property
    def is_over(self) -> bool:
        return self.has_ended or (not self._has_failed and self.progress.must_end())

    @property
    def failure(self) -> str | None:
        if self._has_failed:
            return "a token was rejected"
        return None if self.has_ended else self.progress.failure()


def model_grammars(config: EngineConfig) -> Grammars:
    """The grammars of an engine's model; reads and imports nothing yet."""
    model = config.model

    def read() -> TokenizerFiles:
        from ringcore.checkpoint.tokenizer import (
            read_tokenizer_files,  # a process without structured outputs needs none
        )

        return read_tokenizer_files(model.files)

    return Grammars(
        read,
        model.spec.vocab_size,
        model.spec.eos_token_ids,
        config.scheduler.structured_outputs_backend,
    )


def grammar_key(spec: StructuredOutputsParams) -> str:
    """The cache key of a grammar. The order of a schema's properties is significant: completions write them in it."""
    value = getattr(spec, spec.kind)
    return f"{spec.kind} {value if isinstance(value, str) else json.dumps(value)}"


def _installed(name: BackendName) -> str:
    """The name of an installed library. Raises `InvalidRequestError` where there is none."""
    wanted = ["llguidance", "xgrammar"] if name == "auto" else [name]
    for library in wanted:
        if importlib.util.find_spec(library) is not None:
            return library
    raise InvalidRequestError(
        f"structured_outputs: {wanted[0]} is not installed; run pip install '{_EXTRAS[wanted[0]]}', or leave "
        "structured_outputs out",
        field="structured_outputs",
        value=None,
    )


def _make_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Imports the library."""
    if name == "llguidance":
        from ringcore.grammars.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary)
    from ringcore.grammars.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)
