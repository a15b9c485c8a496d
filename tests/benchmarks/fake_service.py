"""A raw service in which each token is a word of its own; FAKE_SHIFT in its environment makes it say other words.

python fake_service.py PORT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # as a script
from raw_service import RawHandler, RawService

SHIFT = os.environ.get("FAKE_SHIFT", "")


class Handler(RawHandler):
    refusal = 404, "no such model"

    def choices_of(self, i: int, *, is_chat: bool) -> list[dict[str, Any]]:
        texts = [f" word{i}{SHIFT}", *([""] if i == 0 else [])]  # a token without text, as within a character
        return [{"index": 0, "text": text} for text in texts]


def make_server(port: int = 0) -> RawService:
    return RawService(Handler, port)


if __name__ == "__main__":
    make_server(int(sys.argv[1])).serve_forever()
