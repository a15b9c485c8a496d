"""Two models in one process, both streaming at once: two engines, one event loop.

    python examples/two_models.py [--left MODEL] [--right MODEL] [--prompt TEXT] [--max-tokens N] [--device cpu|cuda]

The default for both is the folder that `make setup` makes. On one GPU each engine gets 0.4 of its memory. Printed is
who says what, as it comes, then both texts and how long they took together.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path

from ringcore import AsyncEngine, SamplingParams

DEFAULT_MODEL = str(Path("~/.cache/ringcore/smollm2-135m").expanduser())
SHARE = 0.4  # of the device's memory, for each


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left", default=DEFAULT_MODEL, help="a model folder, a .gguf file, or a hub id")
    parser.add_argument("--right", default=DEFAULT_MODEL, help="the same")
    parser.add_argument("--prompt", default="The tide comes in and")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    args = parser.parse_args()

    options = {"device": args.device, "max_model_len": 512, "gpu_memory_utilization": SHARE, "kv_cache_bytes": 1 << 27}
    # Both processes start here, and load their weights at the same time.
    left, right = AsyncEngine(args.left, **options), AsyncEngine(args.right, **options)
    async with left, right:
        started = time.monotonic()
        texts = await asyncio.gather(
            say("left", left, args.prompt, args.max_tokens), say("right", right, args.prompt, args.max_tokens)
        )
        seconds = time.monotonic() - started
    for name, text in zip(("left", "right"), texts, strict=True):
        print(f"{name} in whole: {args.prompt}{text}")
    print(f"{2 * args.max_tokens} tokens at most, in {seconds:.2f} s")


async def say(name: str, engine: AsyncEngine, prompt: str, max_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, output_kind="delta")
    pieces = []
    async for output in engine.generate(prompt, params):
        pieces.append(output.outputs[0].text)
        print(f"{name}: {pieces[-1]!r}", flush=True)
    return "".join(pieces)


if __name__ == "__main__":
    asyncio.run(main())
