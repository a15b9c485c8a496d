"""A backend of grammars over tokens that cut characters anywhere: what it accepts, and what is written by its masks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringcore.grammars.backend import Backend
from ringcore.grammars.vocabulary import Vocabulary
from ringcore.params.structured_outputs import StructuredOutputsParams

# Beside every byte: halves of characters, a half with a letter, several characters, and much white space.
PIECES = [
    *(
        "ab",
        "aa",
        '"a',
        '":',
        '",',
        '{"',
        "é",
        "éé",
        "🙂",
        "a\n",
        "\n\n",
        "  ",
        "    ",
        "\n  ",
        " \n",
        "\t\t",
        "12",
        "0.",
    ),
    *(b"\xc3", b"\xa9a", b"\xf0\x9f", b"\x99\x82", b"\x9f\x99", b"a\xc3", b"\\u", b"\\n"),
]
TOKENS = [*(bytes([i]) for i in range(256)), *(p.encode() if isinstance(p, str) else p for p in PIECES), b"<end>"]
END = len(TOKENS) - 1
BLANK = [i for i, token in enumerate(TOKENS) if not token.strip(b" \t\r\n")]


def make_backend(name: str) -> Backend:
    vocabulary = Vocabulary(TOKENS, [END], (END,), lambda text: list(text.encode()))
    if name == "llguidance":
        from ringcore.grammars.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary)
    from ringcore.grammars.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(vocabulary)


class Grammar:
    """One compiled grammar. Raises `InvalidRequestError` where it is refused."""

    def __init__(self, backend: Backend, spec: StructuredOutputsParams) -> None:
        self._backend, self._compiled = backend, backend.compile(spec)

    def accepts(self, text: str, rng: random.Random) -> bool:
        """Whether the text, cut at random, is a whole sentence. What a mask allows has to be taken; a text that the
        grammar forces is taken in other tokens too than those that the mask has."""
        progress, left = self._backend.begin(self._compiled), text.encode()
        while left:
            token_id = rng.choice([i for i, token in enumerate(TOKENS[:END]) if left.startswith(token)])
            is_allowed = token_id in self._allowed(progress)
            if not progress.accept(token_id):
                assert not is_allowed, (text, left)
                return False
            left = left[len(TOKENS[token_id]) :]
        assert progress.can_end() == (END in self._allowed(progress)), text
        return progress.can_end()

    def write(self, rng: random.Random, max_tokens: int = 300, preferred: Sequence[int] = ()) -> bytes | None:
        """A sentence of random tokens; None where it has no end by then. preferred: are taken wherever they may be."""
        progress, text = self._backend.begin(self._compiled), b""
        for num_tokens in range(max_tokens):
            allowed = self._allowed(progress)
            assert allowed, f"nothing is allowed after {text!r}: {progress.failure()}"
            liked = [i for i in preferred if i in allowed]
            if not liked and END in allowed and (len(allowed) == 1 or rng.random() < 0.3 + num_tokens / max_tokens):
                return text
            others = sorted(allowed - {END})
            closing = [i for i in others if TOKENS[i][-1:] in (b'"', b"]", b"}")]
            sure = closing and rng.random() < 0.2 + num_tokens / max_tokens
            token_id = rng.choice(liked or (closing if sure else others))
            assert progress.accept(token_id), f"{token_id} was allowed and is refused"
            text += TOKENS[token_id]
        return None

    def _allowed(self, progress: Any) -> set[int]:
        mask = np.zeros((1, -(-len(TOKENS) // 32)), np.int32)
        if progress.failure() is not None:
            return set()
        self._backend.fill([(0, progress)], mask)
        return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
