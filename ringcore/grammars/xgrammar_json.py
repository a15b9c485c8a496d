"""The grammar that xgrammar makes of a JSON schema, with JSON's strings, patterns and blanks as they have to be.

xgrammar's own blanks are any spaces and line breaks up to a count; its strings may have halves of surrogate pairs; and
with patterns it leaves escapes out and lets bytes through that are no UTF-8. So its grammar is written out, these are
put in their place, and it is read again.
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

_MAX_BLANKS = 64  # a number to know its blanks by
_STRING, _SET = r'"(?:\\.|[^"\\])*"', r"\[(?:\\.|[^\]\\])*\]"
_BLANKS = rf"whitespace(?:_\d+)?\{{0, {_MAX_BLANKS}\}}"
# What is quoted otherwise is left as it is: the name of a property may look like anything.
_PARTS = re.compile(rf"Regex\((?P<regex>{_STRING})[^)]*\)|{_STRING}|(?P<set>{_SET})|(?P<blanks>{_BLANKS})")
_PLAIN_SET = r"[^\0-\x1f\"\\\r\n]"  # of the characters of a string
_RULES_OF_BLANKS = re.compile(r"^whitespace(?:_\d+)? ::= .*\n", re.MULTILINE)
_RULE_OF_ESCAPES = re.compile(r"^basic_escape ::= .*$", re.MULTILINE)
# What an array with prefixItems holds, where that may be nothing: blanks would stand before it and behind it.
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
    """In GBNF. is_open: objects without properties may have any. Raises RuntimeError of xgrammar."""
    grammar = xgrammar.Grammar.from_json_schema(
        json.dumps(schema), any_whitespace=True, strict_mode=not is_open, max_whitespace_cnt=_MAX_BLANKS
    )
    text = _PARTS.sub(_in_place, str(grammar))
    text, num_escapes = _RULE_OF_ESCAPES.subn(lambda _: _ESCAPES, _RULES_OF_BLANKS.sub("", text))
    assert num_escapes == 1, "xgrammar writes its grammars in another way"
    for rule in _MAYBE_NOTHING.findall(text):
        text = _with_empty_array(text, *rule)
    return text + _RULES


def _with_empty_array(text: str, name: str, items: str) -> str:
    array = f'("[" json_blanks {name} json_blanks "]")'
    assert array in text, "xgrammar writes its grammars in another way"
    return text.replace(f'{name} ::= ("" | {items})', f"{name} ::= ({items})").replace(
        array, f'("[" json_blanks "]") | {array}'
    )


def _in_place(found: re.Match[str]) -> str:
    if found["blanks"]:
        return "json_blanks"
    if found["regex"]:
        return write_gbnf(search_regex(re.sub(r"\\(.)", r"\1", found["regex"][1:-1])))
    return "json_plain" if found["set"] == _PLAIN_SET else found[0]
