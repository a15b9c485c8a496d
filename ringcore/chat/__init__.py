"""Parses a chat model's output into content, reasoning and tool calls. Works on text, so with any tokenizer.

chat_format = choose_format(tokenizer.chat_template)
parser = ChatParser(chat_format, tools=request_tools, prompt_end=prompt_text[-32:])
for delta in deltas:
    events = parser.feed(delta)
events = parser.finish()
"""

from ringcore.chat.events import (
    ChatEvent,
    ChatMessage,
    ContentDelta,
    MessageBuilder,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from ringcore.chat.formats import (
    FORCED_CALLS_OF_ANY_MODEL,
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    ChatFormat,
    choose_format,
)
from ringcore.chat.grammars import answer_grammar
from ringcore.chat.messages import to_template_messages
from ringcore.chat.parser import ChatParser, parse_message, random_call_id
from ringcore.chat.special_tokens import SpecialTokenFilter

__all__ = [
    "FORCED_CALLS_OF_ANY_MODEL",
    "REASONING_FORMATS",
    "TOOL_CALL_FORMATS",
    "ChatEvent",
    "ChatFormat",
    "ChatMessage",
    "ChatParser",
    "ContentDelta",
    "MessageBuilder",
    "ReasoningDelta",
    "SpecialTokenFilter",
    "ToolCall",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "answer_grammar",
    "choose_format",
    "parse_message",
    "random_call_id",
    "to_template_messages",
]
