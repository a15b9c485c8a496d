"""The tables of docs/guide/from_vllm.md: vLLM's names, from the tables by which the engine reads them.

python scripts/from_vllm.py           writes them
python scripts/from_vllm.py --check   fails if they are not what the engine says
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

from ringcore import EngineConfig, SamplingParams
from ringcore.openai_api.request_fields import REQUEST_FIELDS
from ringcore.openai_api.schema import ChatCompletionRequest, CompletionRequest
from ringcore.params.vllm_api import DIFFERENT_ENDPOINTS, DIFFERENT_METHODS, ENDPOINTS, LLM_METHODS
from ringcore.params.vllm_names import ENGINE_OPTIONS, SAMPLING_PARAMETERS, VllmName

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guide" / "from_vllm.md"
NAMES = ROOT / "tests" / "data" / "vllm_names.json"
OPEN, CLOSE = "<!-- names -->\n", "<!-- /names -->"


def tables() -> str:
    theirs = json.loads(NAMES.read_text())
    of_a_request = dict.fromkeys(theirs["ChatCompletionRequest"] + theirs["CompletionRequest"])
    ours = set(ChatCompletionRequest.model_fields) | set(CompletionRequest.model_fields)
    engine, sampling = set(EngineConfig.options()), {one.name for one in fields(SamplingParams)}
    return "\n".join(
        [
            "## Engine options",
            "",
            *_table(theirs["EngineArgs"], engine, ENGINE_OPTIONS),
            "",
            "## Sampling parameters",
            "",
            *_table(theirs["SamplingParams"], sampling, SAMPLING_PARAMETERS),
            "",
            "## Fields of a request",
            "",
            *_table(of_a_request, ours, REQUEST_FIELDS),
            "",
            "## Methods of LLM",
            "",
            *_calls(theirs["LLM"], DIFFERENT_METHODS, LLM_METHODS),
            "",
            "## Endpoints",
            "",
            *_calls(theirs["endpoints"], DIFFERENT_ENDPOINTS, ENDPOINTS),
            "",
        ]
    )


def _table(theirs: Iterable[str], ours: set[str], names: Mapping[str, VllmName]) -> Iterable[str]:
    same = [f"`{name}`" for name in theirs if name in ours]
    yield f"The same here: {', '.join(same)}."
    yield ""
    yield "| vLLM's | here | accepted |"
    yield "| --- | --- | --- |"
    for one in {id(one): one for one in names.values()}.values():
        of_it = ", ".join(f"`{name}`" for name, other in names.items() if other is one)
        yield f"| {of_it} | {one.here} | {', '.join(f'`{value!r}`' for value in (None, *one.neutral))} |"


def _calls(theirs: Iterable[str], differing: Mapping[str, str], lacking: Mapping[str, str]) -> Iterable[str]:
    same = [f"`{name}`" for name in theirs if name not in differing and name not in lacking]
    yield f"The same here: {', '.join(same)}."
    for title, texts in (("here it differs", differing), ("here", lacking)):
        yield ""
        yield f"| vLLM's | {title} |"
        yield "| --- | --- |"
        for text in dict.fromkeys(texts.values()):
            yield f"| {', '.join(f'`{name}`' for name, other in texts.items() if other == text)} | {text} |"


def main() -> int:
    before, rest = PAGE.read_text().split(OPEN)
    page = before + OPEN + tables() + CLOSE + rest.split(CLOSE)[1]
    if "--check" in sys.argv:
        if page != PAGE.read_text():
            print(f"{PAGE.relative_to(ROOT)}: its tables are old; run python scripts/from_vllm.py", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
