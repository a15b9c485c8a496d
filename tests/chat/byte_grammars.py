"""A tokenizer of bytes and markers, and whether a text is an answer of a grammar."""

from __future__ import annotations

import pytest

from ringcore.chat import ChatFormat
from ringcore.params.structured_outputs import StructuredOutputsParams

llguidance = pytest.importorskip("llguidance")

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", *sorted(ChatFormat(None, "harmony").markers))
IDS = {marker: 257 + i for i, marker in enumerate(MARKERS)}


class Bytes:
    """A tokenizer of bytes and markers, which are special tokens or plain ones."""

    eos_token_id, bos_token_id, unique_no_split_tokens = 256, None, ()
    tokens = (*(bytes([i]) for i in range(256)), b"<end>", *(marker.encode() for marker in MARKERS))

    def __init__(self, is_special: bool) -> None:
        self.special_token_ids = [256, *(IDS.values() if is_special else ())]

    def __call__(self, text) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


TOKENIZERS = [llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes(is_special))) for is_special in (False, True)]
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["plain", "special"])


def encode(text: str, markers: dict[str, int] = IDS) -> list[int]:
    ids: list[int] = []
    while text:
        marker = next((one for one in markers if text.startswith(one)), None)
        ids += [markers[marker]] if marker else text[0].encode()
        text = text[len(marker or "x") :]
    return ids


def takes(tokenizer, params: StructuredOutputsParams, text: str, markers: dict[str, int] = IDS) -> bool:
    """Whether this whole text is an answer; token by token, each within the mask of its place."""
    assert params.grammar is not None
    matcher = llguidance.LLMatcher(tokenizer, params.grammar)
    assert not matcher.is_error(), matcher.get_error()
    for token_id in encode(text, markers):
        mask = matcher.compute_bitmask()
        if not mask[token_id // 8] >> token_id % 8 & 1 or not matcher.consume_token(token_id):
            return False
    return bool(matcher.is_accepting())
