"""Random JSON schemas that have a value, and texts written at random under a grammar's masks."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ringcore.checkpoint.tokenizer import Tokenizer
from ringcore.checkpoint.tokenizer_files import TokenizerFiles
from ringcore.grammars import Grammars
from ringcore.grammars.vocabulary import read_vocabulary

PATTERNS = ["^[a-z]{2,4}$", "^(foo|bar)+$", r"^\d{3}-\d{2}$", "^[A-Z][a-z]*$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6"]
ENUM = ["red", "green é", 'a "quoted" \\ one', 7, -1.5, True, None, [1, "x"], {"k": 1}]


class SchemaMaker:
    """Seeded. for_xgrammar: only what that backend keeps."""

    def __init__(self, seed: int, for_xgrammar: bool = False) -> None:
        self._random = random.Random(seed)
        self._for_xgrammar = for_xgrammar

    def make(self) -> dict[str, Any]:
        """With definitions beside it, of which one may refer to itself where it may also end."""
        schema = self._object(3)
        schema["$defs"] = {"leaf": self._scalar(), "tree": self._tree()}
        return schema

    def _tree(self) -> dict[str, Any]:
        children = {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
        properties = {"name": {"type": "string", "maxLength": 6}, "children": children}
        return {
            "type": "object",
            "properties": properties,
            "required": ["name"],
            "additionalProperties": False,
        }

    def _any(self, depth: int) -> dict[str, Any]:
        kinds = [self._scalar, self._scalar, self._enum, self._const, self._ref]
        if depth > 0:
            kinds += [lambda: self._object(depth - 1), lambda: self._array(depth - 1), lambda: self._any_of(depth - 1)]
        return self._random.choice(kinds)()

    def _scalar(self) -> dict[str, Any]:
        return self._random.choice([self._string, self._integer, self._number, self._plain])()

    def _plain(self) -> dict[str, Any]:
        return {"type": self._random.choice(["boolean", "null", ["string", "null"], ["integer", "boolean"]])}

    def _string(self) -> dict[str, Any]:
        match self._random.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._random.choice(PATTERNS)}
            case 1:
                return {"type": "string", "format": self._random.choice(FORMATS)}
            case 2:
                low = self._random.randrange(4)
                return {"type": "string", "minLength": low, "maxLength": low + self._random.randrange(8)}
            case _:
                return {"type": "string", "maxLength": 12}

    def _integer(self) -> dict[str, Any]:
        low = self._random.randrange(-1000, 1000)
        bounds = [
            {"minimum": low, "maximum": low + self._random.randrange(500)},
            {"exclusiveMinimum": low},
            {"maximum": low},
            {},
        ]
        schema = {"type": "integer"} | self._random.choice(bounds)
        if not self._for_xgrammar and self._random.random() < 0.2:
            schema = {"type": "integer", "minimum": 0, "multipleOf": self._random.choice([2, 5, 10])}
        return schema

    def _number(self) -> dict[str, Any]:
        low = round(self._random.uniform(-100, 100), 2)
        bounds = [{"minimum": low, "maximum": low + 10}, {"minimum": low}, {"exclusiveMaximum": low}, {}]
        return {"type": "number"} | self._random.choice(bounds)

    def _enum(self) -> dict[str, Any]:
        return {"enum": self._random.sample(ENUM, self._random.randrange(1, 5))}

    def _const(self) -> dict[str, Any]:
        return {"const": self._random.choice(ENUM)}

    def _ref(self) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self._random.choice(['leaf', 'tree'])}"}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randrange(1, 4))]}

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._random.randrange(3)
        schema = {"type": "array", "minItems": low, "maxItems": low + self._random.randrange(3)}
        if self._random.random() < 0.3:
            firsts = [self._any(depth) for _ in range(self._random.randrange(1, 3))]
            return {"type": "array", "prefixItems": firsts, "items": False, "minItems": len(firsts)}
        return schema | {"items": self._any(depth)}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(["a", "name", "é", "two words", "x-1", "Z"], self._random.randrange(1, 5))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._any(depth) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.6]
        match self._random.randrange(3):
            case 0:
                schema["additionalProperties"] = False
            case 1 if not self._for_xgrammar:
                schema |= {"additionalProperties": {"type": "integer"}, "maxProperties": len(names) + 2}
                schema["required"] = names
        return schema


class Walker:
    """Writes completions: any token that the mask allows, the end and what closes something more often than others."""

    def __init__(self, grammars: Grammars, files: TokenizerFiles, vocab_size: int, eos_token_ids: list[int]) -> None:
        self.grammars, self.tokenizer = grammars, Tokenizer(files)
        self._vocab_size, self._eos = vocab_size, eos_token_ids
        self._tokens = read_vocabulary(files, vocab_size, eos_token_ids).tokens
        closing = [self.tokenizer.token_text(i) for i in range(min(vocab_size, self.tokenizer.vocab_size))]
        self._closing = [i for i, text in enumerate(closing) if text in ('"', "}", "]", ",")]
        self._blank = [i for i, text in enumerate(closing) if not text.strip()]

    def allowed(self, matcher: Any) -> np.ndarray:
        """The ids that may be next, [n]."""
        masks = np.full((1, -(-self._vocab_size // 32)), -1, np.int32)
        self.grammars.fill_bitmasks([matcher], masks)
        bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
        assert not bits[self._vocab_size :].any(), "a bit beyond the vocabulary"
        return np.flatnonzero(bits)

    def write(self, spec: Any, seed: int, max_tokens: int = 2000) -> str:
        """The text of a whole completion."""
        chance, matcher, ids = np.random.default_rng(seed), self.grammars.matcher(spec), []
        for _ in range(max_tokens):
            allowed = self.allowed(matcher)
            assert len(allowed), f"nothing is allowed after {self._text(ids)!r}: {matcher.failure}"
            token_id = self._choose(allowed, chance)
            assert not matcher.is_over or token_id in self._eos
            assert matcher.accept([token_id]), f"{token_id} was allowed and is refused"
            if token_id in self._eos:
                assert matcher.is_over
                assert set(self.allowed(matcher)) == set(self._eos)
                return self._text(ids).decode()
            ids.append(token_id)
        raise AssertionError(f"no end after {max_tokens} tokens: {self._text(ids)!r}")

    def _text(self, ids: list[int]) -> bytes:
        return b"".join(self._tokens[i] for i in ids)

    def _choose(self, allowed: np.ndarray, chance: np.random.Generator) -> int:
        for favoured, share in ((self._eos, 0.5), (self._closing, 0.3)):
            found = np.intersect1d(allowed, favoured)
            if len(found) and (len(found) == len(allowed) or chance.random() < share):
                return int(chance.choice(found))
        dense = np.setdiff1d(allowed, self._blank)
        return int(chance.choice(dense if len(dense) and chance.random() < 0.9 else allowed))
