"""The grammar of an answer: tool calls, text of a given form, and reasoning before it.

The grammar is in llguidance's Lark, and of the format's syntax (`OutputSyntax.rules`). A request for a form of text
only, of a model whose output is that text alone, uses its own specification unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ringcore.chat.formats import ChatFormat
from ringcore.chat.syntax import AnswerForm, Marks
from ringcore.params.structured_outputs import StructuredOutputsParams

__all__ = ["answer_grammar"]

_HEADER = "%llguidance {}"


def answer_grammar(
    chat_format: ChatFormat,
    *,
    text: StructuredOutputsParams | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    must_call: bool = False,
    is_parallel: bool = True,
    prompt_end: str = "",
    marker_ids: Mapping[str, int] | None = None,
) -> StructuredOutputsParams | None:
    """The structured outputs that constrain a completion to the request; None where nothing is constrained.

    text: the form of a text answer. With tools, an answer has that form or is calls; a grammar of the client is for
        the whole completion, including reasoning and calls.
    tools: the callable tools, in OpenAI's format. must_call: only calls of these, at least one. is_parallel: more
        calls may follow the first, in formats that have several in an output.
    prompt_end: as for `ChatParser`: reasoning may start or end there.
    marker_ids: the token ids of the format's single-token markers. Both such a token and its text spelled in other
        tokens are accepted: whether a grammar sees a special token as text depends on its tokenizer.

    Raises `InvalidRequestError` for tools that cannot be called in this format, and for what no grammar can enforce.
    """
    if text is None and not must_call:
        return None
    assert not (must_call and text), "must_call excludes a text form"
    if text is not None and text.kind == "grammar":
        return text
    functions = [tool["function"] for tool in tools]
    form = AnswerForm(text, functions, is_parallel, prompt_end, Marks(marker_ids or {}))
    rules = chat_format.syntax.rules(form)
    return text if rules is None else StructuredOutputsParams(grammar="\n".join([_HEADER, *rules, ""]))
