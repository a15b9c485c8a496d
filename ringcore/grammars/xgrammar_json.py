"""xgrammar's grammar of a JSON schema, with corrected strings, patterns and whitespace.

xgrammar's whitespace is any spaces and line breaks up to a count; its strings may contain lone surrogates; and its
patterns ignore escapes and accept invalid UTF-8. So its grammar is printed, these rules are replaced in the text, and
the text is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xgrammar

from ringcore.grammars.json_schemas import MAX_INDENT
from ringcore.grammars.regular_expressions import search_regex
from ringcore.grammars.xgrammar_regex import write_gbnf

__all__ = ["json_grammar"]

_MAX_BLANKS = 64  # an arbitrary count that identifies whitespace in the printed grammar
_STRING, _SET = r'"(?:\\.|[^"\\])*"', r"\[(?:\\.|[^\]\\])*\]"
_BLANKS = rf"whitespace(?:_\d+)?\{{0, {_MAX_BLANKS}\}}"
# Other quoted text is left unchanged: a property's name may look like a rule.
_PARTS = re.compile(rf"Regex\((?P<regex>{_STRING})[^)]*\)|{_STRING}|(?P<set>{_SET})|(?P<blanks>{_BLANKS})")
_PLAIN_SET = r"[^\0-\x1f\"\\\r\n]"  # of the characters of a string
_RULES_OF_BLANKS = re.compile(r"^whitespace(?:_\d+)? ::= .*\n", re.MULTILINE)
_RULE_OF_ESCAPES = re.compile(r"^basic_escape ::= .*$", re.MULTILINE)
# The contents of an array with prefixItems, if they may be empty: an empty array would allow whitespace twice.
_MAYBE_NOTHING = re.compile(r'^(\w+_suffix_0) ::= \("" \| (.*)\)$', re.MULTILINE)
_RULES = rf"""
json_blanks ::= "" | " " | "\n" [ ]{{0,{MAX_INDENT}}} | "\n" [\t]{{1,{MAX_INDENT // 4}}}
json_plain ::= [ -!#-\[\]-\ud7ff\ue000-\U0010ffff]
json_hex ::= [0-9a-fA-F]
json_unit ::= [0-9abcefABCEF] json_hex json_hex json_hex | [dD] [0-7] json_hex json_hex
json_halves ::= [dD] [89abAB] json_hex json_hex "\\u" [dD] [c-fC-F] json_hex json_hex
"""
_ESCAPES = r"""basic_escape ::= ["\\/bfnrt] | "u" json_unit | "u" json_halves"""


def json_grammar(schema: Mapping[str, Any], *, is_open: bool) -> str:
    """The grammar in GBNF. is_open: objects without declared properties may have any. Raises xgrammar's
    RuntimeError."""
    grammar = xgrammar.Grammar.from_json_schema(
        json.dumps(schema), any_whitespace=True, strict_mode=not is_open, max_whitespace_cnt=_MAX_BLANKS
    )
    text = _PARTS.sub(_in_place, str(grammar))
    text, num_escapes = _RULE_OF_ESCAPES.subn(lambda _: _ESCAPES, _RULES_OF_BLANKS.sub("", text))
    assert num_escapes == 1, "xgrammar prints its grammars in another format"
    for rule in _MAYBE_NOTHING.findall(text):
        text = _with_empty_array(text, *rule)
    return text + _RULES


def _with_empty_array(text: str, name: str, items: str) -> str:
    array = f'("[" json_blanks {name} json_blanks "]")'
    assert array in text, "xgrammar prints its grammars in another format"
    return text.replace(f'{name} ::= ("" | {items})', f"{name} ::= ({items})").replace(
        array, f'("[" json_blanks "]") | {array}'
    )


def _in_place(found: re.Match[str]) -> str:
    if found["blanks"]:
        return "json_blanks"
    if found["regex"]:
        return write_gbnf(search_regex(re.sub(r"\\(.)", r"\1", found["regex"][1:-1])))
    return "json_plain" if found["set"] == _PLAIN_SET else found[0]
