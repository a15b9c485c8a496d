"""Answers in a form: a JSON schema, a regular expression, a choice; and a logits processor of one's own.

python examples/structured_answers.py --model path/to/model
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ringcore import LLM, LogitsProcessor, LogitsProcessorContext, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "population": {"type": "integer", "minimum": 0}},
    "required": ["name", "population"],
    "additionalProperties": False,
}


class OneOfFew(LogitsProcessor):
    """Leaves to each row the k most likely tokens, where the request's `extra_args` have `one_of`."""

    def __init__(self, context: LogitsProcessorContext) -> None:
        super().__init__(context)
        self._counts = np.zeros(context.max_num_seqs, dtype=np.int64)

    @classmethod
    def validate_params(cls, params: SamplingParams) -> None:
        count = (params.extra_args or {}).get("one_of", 1)
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"one_of={count!r}: give a number of tokens, 1 or more")

    def admit(self, row: int, params: SamplingParams, prompt_token_ids: np.ndarray) -> bool:
        self._counts[row] = (params.extra_args or {}).get("one_of", 0)
        return bool(self._counts[row])

    def apply(self, logits, rows: np.ndarray, token_ids: Sequence[np.ndarray] | None) -> None:
        for scores, count in zip(logits, self._counts[rows].tolist(), strict=True):
            kept = min(count, len(scores))
            scores[scores < scores.topk(kept).values[-1]] = float("-inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default=str(Path.home() / ".cache/ringcore/smollm2-135m"))
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    forms = {
        "A city as JSON:": StructuredOutputsParams(json=SCHEMA),
        "Today's date is": StructuredOutputsParams(regex=r" \d{4}-\d{2}-\d{2}"),
        "Is water wet? Answer:": StructuredOutputsParams(choice=[" yes", " no"]),
    }
    # A worker imports the class by its name, so it is looked up in this file's module, not in __main__.
    sys.path.insert(0, str(Path(__file__).parent))
    with LLM(options.model, dtype=options.dtype, logits_processors=["structured_answers:OneOfFew"]) as llm:
        params = [
            SamplingParams(temperature=0.8, seed=1, max_tokens=64, structured_outputs=form) for form in forms.values()
        ]
        outputs = llm.generate(list(forms), params)
        for output in outputs:
            print(f"{output.prompt}{output.outputs[0].text}")
        print("read back:", json.loads(outputs[0].outputs[0].text))
        few = SamplingParams(temperature=0.8, seed=1, max_tokens=16, extra_args={"one_of": 2})
        print("one of two at each place:", llm.generate("Once upon a time", few)[0].outputs[0].text)


if __name__ == "__main__":
    main()
