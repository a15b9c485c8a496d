"""Random JSON schemas that use keywords as they come, supported or not, and values that may satisfy them."""

from __future__ import annotations

import json
import random
from typing import Any

NAMES = ["a", "ab", "b", "é", "x y", "whitespace{0, 64}", 'q"']
_PATTERNS = [
    "a",
    "^a",
    "b$",
    "^[a-c]*$",
    r"^\w+$",
    r"\d",
    r"^\W*$",
    r"^[^\s]+$",
    r"^[^a]{1,2}$",
    '^"+$',
    r"\\",
    "^(a|é)b?$",
]
_FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri"]
_VALUES = ["a", "é\n", 'say "x"', "", 1, 0, -3, 2.5, 1.0, True, False, None, [1, "a"], {"a": 1}, [], {}]
_TEXTS = 'ab1é🙂"\\/\n -A'


def any_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Keywords of one type, or of several, with the type beside them or without."""
    makers = [_string, _string, _number, _number, _constant]
    if depth:
        makers += [_object, _object, _array, _union]
    schema = rng.choice(makers)(rng, depth)
    if rng.random() < 0.1:
        schema |= rng.choice(makers)(rng, depth)
    return schema


def _some(rng: random.Random, share: float, **keywords: Any) -> dict[str, Any]:
    return {name: value for name, value in keywords.items() if rng.random() < share}


def _type(rng: random.Random, name: str) -> dict[str, Any]:
    return rng.choice([{"type": name}] * 7 + [{"type": [name, "null"]}, {"type": [name, "boolean"]}, {}])


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(4)
    kinds = [{"pattern": rng.choice(_PATTERNS)}, {"format": rng.choice(_FORMATS)}, {}]
    lengths = _some(rng, 0.3, minLength=low, maxLength=low + rng.randrange(5))
    return {**_type(rng, "string"), **rng.choice(kinds), **lengths}


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.choice([rng.randrange(-20, 20), round(rng.uniform(-9, 9), 2), 2**53 + 1, 0.0])
    keywords = _some(
        rng, 0.3, minimum=low, maximum=low + rng.randrange(9), exclusiveMinimum=low, exclusiveMaximum=low + 5
    )
    return {
        **_type(rng, rng.choice(["integer", "number"])),
        **keywords,
        **_some(rng, 0.1, multipleOf=rng.choice([2, 0.5])),
    }


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    if rng.random() < 0.4:
        return {"const": rng.choice(_VALUES)}
    schema: dict[str, Any] = {"enum": rng.sample(_VALUES, rng.randrange(1, 4))}
    return schema | _some(rng, 0.2, type=rng.choice(["string", "integer"]), minLength=1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(NAMES, rng.randrange(4))
    keywords = _some(
        rng,
        0.25,
        required=[name for name in rng.sample(NAMES, 2) if name in names or rng.random() < 0.3],
        additionalProperties=rng.choice([False, False, True, any_schema(rng, depth - 1)]),
        minProperties=rng.randrange(3),
        maxProperties=rng.randrange(1, 4),
    )
    keywords |= _some(rng, 0.1, patternProperties={rng.choice(["^a", "b", "^x y$"]): any_schema(rng, depth - 1)})
    properties = {name: any_schema(rng, depth - 1) if rng.random() < 0.9 else rng.random() < 0.5 for name in names}
    return {**_type(rng, "object"), **({"properties": properties} if names else {}), **keywords}


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randrange(3)
    keywords = _some(
        rng,
        0.4,
        items=rng.choice([False, any_schema(rng, depth - 1)]),
        minItems=low,
        maxItems=low + rng.randrange(3),
        prefixItems=[any_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))],
    )
    return {**_type(rng, "array"), **keywords, **_some(rng, 0.1, uniqueItems=rng.random() < 0.5)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    name = rng.choice(["anyOf", "anyOf", "allOf", "oneOf"])
    return {name: [any_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]}


def any_text(rng: random.Random, depth: int = 2) -> str:
    """The text of a value, blanks, escapes and doubled keys among it."""
    kind = rng.randrange(8 if depth else 5)
    match kind:
        case 0 | 1:
            text = "".join(rng.choice(_TEXTS) for _ in range(rng.randrange(4)))
            return json.dumps(text, ensure_ascii=rng.random() < 0.2)
        case 2 | 3:
            return rng.choice(
                [str(rng.randrange(-25, 25)), str(round(rng.uniform(-9, 9), 2)), "-0", "1e5", "2.50", "1.0"]
            )
        case 4:
            return rng.choice(["null", "true", "false"])
        case 5:
            return f"[{', '.join(any_text(rng, depth - 1) for _ in range(rng.randrange(4)))}]"
        case _:
            keys = [rng.choice([json.dumps(rng.choice(NAMES)), '"\\u0061"', '"abc"']) for _ in range(rng.randrange(4))]
            colon = rng.choice([": ", ":", ":\n"])
            return "{" + ",".join(f"{key}{colon}{any_text(rng, depth - 1)}" for key in keys) + "}"
