"""What transformers' own model generates greedily: the reference of `ringcore verify`.

A program of its own: `python -m ringcore.model_executor.reference FD` reads a JSON object (`folder`, `dtype`, `prompts`
of token ids, `num_tokens`) from stdin, and writes one for each prompt: `token_ids`, `logprobs` of these, and `gaps`, by
how much each logit was above the next best one. It ends when the pipe FD does, which its parent holds.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM

__all__ = ["generated"]


@torch.inference_mode()
def generated(folder: str, dtype: str, prompts: list[list[int]], num_tokens: int) -> Iterator[dict[str, Any]]:
    """Past any end of text. The model is on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(device).eval()
    for prompt in prompts:
        rows = list(_steps(model, torch.tensor([prompt], device=device), num_tokens))
        yield {name: [row[i] for row in rows] for i, name in enumerate(("token_ids", "logprobs", "gaps"))}


def _steps(model: Any, inputs: torch.Tensor, num_tokens: int) -> Iterator[tuple[int, float, float]]:
    """inputs: token ids [1, num_prompt_tokens]."""
    cache = None
    for _ in range(num_tokens):
        answer = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, logits = answer.past_key_values, answer.logits[0, -1].float()
        best, following = logits.topk(2).values.tolist()
        inputs = logits.argmax().view(1, 1)
        yield int(inputs), float(logits.log_softmax(0).max()), best - following


def _end_with(pipe: int) -> None:
    os.read(pipe, 1)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    for one in generated(**json.load(sys.stdin)):
        sys.stdout.write(json.dumps(one) + "\n")
