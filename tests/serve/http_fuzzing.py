"""Makes wrong HTTP requests of good ones: bodies with wrong fields, and bytes that are no HTTP."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

MESSAGES = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
COMMON = {
    "model": None,
    "n": 2,
    "max_tokens": 4,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
    "stop_token_ids": [3],
    "bad_words": ["no"],
    "allowed_token_ids": [97, 98, 99],
    "presence_penalty": 0.1,
    "response_format": {"type": "text"},
    "priority": 0,
    "cache_salt": "s",
    "ignore_eos": True,
}
BLOCKS = [
    {"type": "thinking", "thinking": "a", "signature": "b"},
    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
]
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "d"}]}
MESSAGE = {
    "max_tokens": 4,
    "system": "a",
    "messages": [{"role": "assistant", "content": BLOCKS}, {"role": "user", "content": [RESULT]}],
    "tools": [{"name": "f", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "none"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
ITEMS = [
    {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "b"},
    {"role": "user", "content": [{"type": "input_text", "text": "d"}]},
]
RESPONSE = {
    "input": ITEMS,
    "instructions": "a",
    "max_output_tokens": 4,
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": "none",
    "reasoning": {"effort": "low"},
}
GOOD = [
    ("/v1/completions", {**COMMON, "prompt": ["ab", "cd"], "logprobs": 1, "echo": True}),
    ("/v1/completions", {**COMMON, "prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {**COMMON, "messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"}),
    ("/v1/chat/completions", {**COMMON, "messages": MESSAGES, "stream": True, "chat_template_kwargs": {"a": 1}}),
    ("/v1/responses", RESPONSE),
    ("/v1/responses", {**RESPONSE, "stream": True, "text": {"format": {"type": "text"}}, "previous_response_id": None}),
    ("/v1/embeddings", {"input": ["ab", "c"], "pooling": "mean", "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": [[97, 98], [99]], "normalize": False}),
    ("/v1/score", {"text_1": ["ab"], "text_2": ["c", "d"]}),
    ("/v1/rerank", {"query": "ab", "documents": ["c", "d"], "top_n": 1}),
    ("/v1/messages", MESSAGE),
    ("/v1/messages", {**MESSAGE, "stream": True, "stop_sequences": ["x"], "top_k": 4}),
    ("/v1/messages/count_tokens", {"messages": MESSAGE["messages"]}),
    ("/tokenize", {"prompt": "abc", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [97, 98]}),
]
NESTED = json.loads("[" * 60 + "]" * 60)
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**70),
    1e308,
    -0.0,
    1e-320,
    "",
    "a",
    "\x00",
    "\ud800",
    "é🙂" * 99,
    "x" * 5000,
    [],
    [[]],
    [None],
    ["a", 1],
    [1] * 3000,
    [2**40],
    [[1, 2], []],
    {},
    {"a": {}},
    {"type": "json_object"},
    NESTED,
    "auto",
    "required",
    {"1": 2},
    {"type": "text", "text": 1},
    [{"role": "user"}],
    [{"role": 1, "content": "a"}],
]
EXTRA = [
    "prompt",
    "messages",
    "tokens",
    "logprobs",
    "top_logprobs",
    "echo",
    "structured_outputs",
    "vllm_xargs",
    "unknown",
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within a JSON value, its own last."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in inner for place in _places(item, (*path, key))] + [path]


def wrong_body(rng: random.Random) -> tuple[str, bytes]:
    """A path and a body for it."""
    path, good = rng.choice(GOOD)
    body: Any = copy.deepcopy(good)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        body = _changed(body, rng)
    text = json.dumps(body)
    match rng.randrange(12):
        case 0:
            text = text[: rng.randrange(len(text))]
        case 1:
            text = text.replace(
                rng.choice("{}[]:,\"'0123456789"), rng.choice(["", "NaN", "Infinity", "\\ud800", "[" * 5000])
            )
        case 2:
            return path, rng.randbytes(rng.randrange(200))
        case 3:
            return path, b"\xef\xbb\xbf" + text.encode()
    return path, text.encode(errors="surrogatepass")


def _changed(body: Any, rng: random.Random) -> Any:
    place = rng.choice(_places(body))
    if not place:
        return (
            rng.choice(VALUES)
            if rng.random() < 0.1 or not isinstance(body, dict)
            else body | {rng.choice(EXTRA): rng.choice(VALUES)}
        )
    holder = body
    for step in place[:-1]:
        holder = holder[step]
    if rng.random() < 0.2:
        del holder[place[-1]]
    else:
        holder[place[-1]] = copy.deepcopy(rng.choice(VALUES))
    return body


def request_bytes(path: str, body: bytes, key: str) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _head(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, *headers, "", ""]).encode("latin-1")


_HOST = "Host: localhost"
_POST = "POST /tokenize HTTP/1.1"
_HEADS = [
    b"\r\n",
    b"\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    _head("GET / HTTP/1.1"),
    _head("FOO /v1/models HTTP/1.1", _HOST),
    _head("HEAD /health HTTP/1.1", _HOST),
    _head("GET /health HTTP/9.9"),
    _head("GET http://evil/ HTTP/1.1", "Host: a", "Host: b"),
    _head("GET / HTTP/1.1", *["A: b"] * 3000),
    _head("GET /" + "a" * 90_000 + " HTTP/1.1"),
    _head("OPTIONS * HTTP/1.1", _HOST),
    _head("CONNECT a:1 HTTP/1.1", _HOST),
    _head("GET /%ff%00 HTTP/1.1", _HOST),
    _head(_POST, _HOST, "Transfer-Encoding: chunked") + b"fffffffff\r\n",
    _head(_POST, _HOST, "Transfer-Encoding: chunked", "Content-Length: 5") + b"0\r\n\r\n",
    _head(_POST, _HOST, "Content-Length: -1"),
    _head("GET /health HTTP/1.1", _HOST, "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
]


def wrong_bytes(rng: random.Random, key: str) -> list[bytes]:
    """What a client writes, piece by piece."""
    data = rng.choice(_HEADS) if rng.random() < 0.4 else request_bytes(*wrong_body(rng), key)
    out = bytearray(data)
    for _ in range(rng.choice([0, 1, 3])):
        at = rng.randrange(len(out)) if out else 0
        match rng.randrange(4):
            case 0 if out:
                out[at] = rng.randrange(256)
            case 1:
                out[at:at] = rng.choice([b"\r\n", b"\x00", b"\r\n\r\n", b": ", rng.randbytes(9)])
            case 2:
                del out[at : at + rng.randrange(30)]
            case 3:
                out += out[: rng.randrange(len(out) + 1)]
    cuts = sorted(rng.randrange(len(out) + 1) for _ in range(rng.randrange(3)))
    return [bytes(out[a:b]) for a, b in zip([0, *cuts], [*cuts, len(out)], strict=True)]
