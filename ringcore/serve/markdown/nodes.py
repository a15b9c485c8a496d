"""Markdown, by markdown-it-py, and code, by Pygments, as plain data from which a page makes elements.

A node is a text, or a list of tag, attributes and children: ["p", {}, "some ", ["em", {}, "soft"], " text"]. HTML in a
text stays text, and a link has one of `_SCHEMES`. A code block is ["code", {"language": "python"}, ...], whose children
are texts and ["span", {"class": "keyword"}, "def"].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import msgspec
from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import (
    Comment,
    Generic,
    Keyword,
    Name,
    Number,
    Operator,
    String,
    _TokenType,
)
from pygments.util import ClassNotFound

__all__ = ["Block", "Node", "blocks_of", "highlighted"]

Node = str | list[Any]

_SCHEMES = ("http://", "https://", "mailto:")
_MAX_CODE = 100_000  # characters of a code block that are coloured
_MAX_LANGUAGE = 32  # characters
_MAX_DEPTH = 100  # of nodes within nodes, for which a reader's stack is enough
_FIRST_HEADING = 3  # below the page's own headings
_INLINE = {"em": "em", "strong": "strong", "s": "del"}
_PLAIN = {
    "blockquote": "blockquote", "bullet_list": "ul", "list_item": "li", "table": "table", "thead": "thead",
    "tbody": "tbody", "tr": "tr", "hr": "hr",
}  # fmt: skip
# The first that a token is of.
_CLASSES = (
    (Comment, "comment"),
    (Generic.Prompt, "comment"),
    (Keyword.Type, "builtin"),
    (Keyword.Constant, "number"),
    (Keyword, "keyword"),
    (Operator.Word, "keyword"),
    (Name.Tag, "keyword"),
    (String, "string"),
    (Number, "number"),
    (Name.Builtin, "builtin"),
    (Name.Decorator, "builtin"),
    (Name.Exception, "builtin"),
    (Name.Function, "name"),
    (Name.Class, "name"),
    (Name.Attribute, "name"),
    (Generic.Heading, "name"),
    (Generic.Subheading, "name"),
    (Generic.Inserted, "inserted"),
    (Generic.Deleted, "deleted"),
)


class Block(msgspec.Struct, frozen=True):
    """A block of the text's top level. line: of the text, where it begins, from 0."""

    line: int
    node: Node


def blocks_of(text: str) -> list[Block]:
    """A text that is nested too deeply is one paragraph, as it is."""
    tokens = _parser().parse(text)
    if any(inner.level > _MAX_DEPTH for token in tokens for inner in (token, *(token.children or ()))):
        return [Block(0, ["p", {}, text])]
    root = SyntaxTreeNode(tokens)
    return [Block(0 if block.map is None else block.map[0], _block(block)) for block in root.children]


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    # Nothing is loaded for an image: it becomes a link.
    parser.disable(["html_block", "html_inline", "image"])
    parser.validateLink = _is_link  # type: ignore[method-assign]
    return parser


def _is_link(url: str) -> bool:
    return url.lower().startswith(_SCHEMES)


def _block(node: SyntaxTreeNode) -> Node:
    match node.type:
        case "fence" | "code_block":
            # The first word of what stands beside the fence.
            language = (node.info.split() or [""])[0][:_MAX_LANGUAGE] if node.type == "fence" else ""
            return ["code", {"language": language}, *highlighted(node.content, language)]
        case "heading":
            level = min(int(node.tag[1]) + _FIRST_HEADING - 1, 6)
            return [f"h{level}", {}, *_children(node)]
        case "ordered_list":
            return ["ol", {"start": str(node.attrs.get("start", 1))}, *_children(node)]
        case "th" | "td":
            align = str(node.attrs.get("style", "")).removeprefix("text-align:")
            return [node.type, {"class": align} if align else {}, *_children(node)]
        case "paragraph":
            return ["p", {}, *_children(node)]
    return [_PLAIN[node.type], {}, *_children(node)]


def _children(node: SyntaxTreeNode) -> Iterator[Node]:
    for child in node.children:
        if child.type == "inline":
            yield from _inlines(child)
        elif child.type == "paragraph" and child.hidden:  # of a list without blank lines
            yield from _children(child)
        else:
            yield _block(child)


def _inlines(node: SyntaxTreeNode) -> Iterator[Node]:
    return (inline for child in node.children if (inline := _inline(child)) != "")


def _inline(node: SyntaxTreeNode) -> Node:
    match node.type:
        case "text":
            return node.content
        case "softbreak" | "hardbreak":
            return "\n"  # the page keeps line breaks
        case "code_inline":
            return ["code", {}, node.content]
        case "link":
            return ["a", {"href": str(node.attrs["href"])}, *_inlines(node)]
    return [_INLINE[node.type], {}, *_inlines(node)]


def highlighted(code: str, language: str) -> list[Node]:
    """The code's texts without its last line break, in order, those of a class as a span."""
    lexer = _lexer(language.lower()) if language and len(code) <= _MAX_CODE else None
    if lexer is None:
        return [code.removesuffix("\n")]
    found: list[tuple[str | None, str]] = []
    for kind, text in lexer.get_tokens(code):
        css_class = None if text.isspace() else _class_of(kind)
        if found and (found[-1][0] == css_class or text.isspace()):
            found[-1] = (found[-1][0], found[-1][1] + text)
        else:
            found.append((css_class, text))
    if found:
        found[-1] = (found[-1][0], found[-1][1].removesuffix("\n"))
    return [text if css_class is None else ["span", {"class": css_class}, text] for css_class, text in found if text]


@lru_cache(maxsize=64)
def _lexer(language: str) -> Lexer | None:
    try:
        # As it is: nothing is stripped, and no line added.
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


@cache
def _class_of(kind: _TokenType) -> str | None:
    return next((css_class for parent, css_class in _CLASSES if kind in parent), None)
