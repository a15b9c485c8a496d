"""Writes the greedy tokens of transformers, in float32, for prompts of many lengths: what tests compare with.

    python scripts/make_reference.py MODEL_FOLDER OUT.json [--new-tokens 24]

A prompt is sentences of the list below in a seeded order, cut to an exact number of tokens. For each step the file
holds the token, its log-probability and the gap between the best two logits: where that gap is tiny, another order
of summation may pick the other token, so a comparison ends there.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
import transformers

# fmt: off
LENGTHS = [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 48, 63, 64, 65, 90, 100, 127, 128, 129, 150, 200, 255, 256,
           257, 300, 350, 400, 500, 511, 512, 513, 700, 900, 1023, 1200, 1500]
# fmt: on

SENTENCES = """
The harbour was quiet when the first boats came in with the tide.
A library lends books, but it also lends a warm place to sit on a cold afternoon.
To bake bread you need flour, water, salt, a little yeast and a lot of patience.
The train to the coast leaves at a quarter past nine from platform four.
Photosynthesis turns light, water and carbon dioxide into sugar and oxygen.
def area(width, height):\n    return width * height
In 1969 people walked on the Moon for the first time.
My grandmother kept a tin of buttons, and every button had a story.
If x is larger than y and y is larger than z, then x is larger than z.
The recipe says to wait an hour; nobody in our house has ever waited an hour.
Rivers carry sand to the sea, grain by grain, for thousands of years.
She opened the letter, read it twice, and put it back without a word.
Prices rose by 3.5 percent in spring and fell again in autumn.
A good tool is one that you stop noticing while you use it.
The orchestra tuned, the lights went down, and somebody coughed.
Question: what has keys but opens no door? Answer: a piano.
Snow fell all night and in the morning the street had no edges.
SELECT name, age FROM people WHERE age > 30 ORDER BY name;
Our team lost by one goal, but the supper afterwards made up for it.
An octopus has three hearts and blue blood.
Measure twice, cut once, and keep the receipt.
The committee will meet on Tuesday to discuss the colour of the new gate.
Bees tell each other where the flowers are by dancing.
He spoke slowly, as if each word had to be brought up from a well.
The shortest distance between two points is often under repair.
""".strip().splitlines()


def make_prompts(tokenizer, lengths: list[int]) -> list[list[int]]:
    rng = random.Random(20)
    prompts = []
    for length in lengths:
        ids: list[int] = []
        while len(ids) < length:
            order = rng.sample(SENTENCES, len(SENTENCES))
            ids += tokenizer.encode(" ".join(order).replace("\\n", "\n"), add_special_tokens=False)
        prompts.append(ids[:length])
    return prompts


@torch.inference_mode()
def continue_greedily(model, prompt: list[int], num_tokens: int) -> dict:
    ids, cache = torch.tensor([prompt]), None
    tokens, gaps, logprobs = [], [], []
    for _ in range(num_tokens):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache, logits = out.past_key_values, out.logits[0, -1].float()
        best = logits.topk(2).values
        token = int(logits.argmax())
        tokens.append(token)
        gaps.append(round(float(best[0] - best[1]), 5))
        logprobs.append(round(float(logits.log_softmax(-1)[token]), 5))
        ids = torch.tensor([[token]])
    return {"prompt_token_ids": prompt, "token_ids": tokens, "gaps": gaps, "logprobs": logprobs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--new-tokens", type=int, default=24)
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    entries = [continue_greedily(model, prompt, args.new_tokens) for prompt in make_prompts(tokenizer, LENGTHS)]
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    origin = f"scripts/make_reference.py: {versions}, float32, greedy"
    lines = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries)
    args.out.write_text(f'{{"origin": {json.dumps(origin)},\n"entries": [\n{lines}\n]}}\n')
    print(f"{len(entries)} prompts, smallest gap {min(min(e['gaps']) for e in entries)}: {args.out}")


if __name__ == "__main__":
    main()
