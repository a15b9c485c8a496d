"""An offline batch: every prompt of a file through one engine, the texts, and how fast it went.

Usage: python examples/offline_batch.py [--model FOLDER] [--prompts FILE] [--max-tokens N]
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from ringcore import LLM, SamplingParams

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ringcore"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(CACHE / "smollm2-135m"))
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.txt", help="one prompt a line")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()

    prompts = [line for line in args.prompts.read_text().splitlines() if line.strip()]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]

    with LLM(args.model) as llm:
        started = time.monotonic()
        outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=args.max_tokens))
        seconds = time.monotonic() - started

    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"\n> {prompt}\n{output.outputs[0].text.strip()}")
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"\n{len(outputs)} prompts, {num_prompt} tokens in, {num_generated} tokens out in {seconds:.2f} s: "
        f"{num_generated / seconds:.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
