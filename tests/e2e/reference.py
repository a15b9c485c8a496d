"""What transformers generated, as data, and how tokens are compared with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"

# Below this gap between the best two logits, another order of float32 additions may pick the other token.
DECISIVE_GAP = 0.001


@dataclass(frozen=True)
class Entry:
    prompt_token_ids: list[int]
    token_ids: list[int]
    gaps: list[float]
    prompt: str | None = None
    text: str | None = None
    logprobs: list[float] | None = None
    chat: bool = False

    @property
    def num_decisive(self) -> int:
        """Steps before the first one that the reference itself nearly decided otherwise."""
        return next((i for i, gap in enumerate(self.gaps) if gap < DECISIVE_GAP), len(self.gaps))


def greedy_tokens(folder: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers generates in float32, past any end of text."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts]


def load(name: str) -> list[Entry]:
    return [Entry(**entry) for entry in json.loads((DATA / f"{name}.json").read_text())["entries"]]


def differences(entries: list[Entry], token_ids: list[list[int]]) -> list[str]:
    """One line for each entry whose tokens differ from the reference before its first indecisive step."""
    assert len(entries) == len(token_ids)
    lines = []
    for i, (entry, got) in enumerate(zip(entries, token_ids, strict=True)):
        n = entry.num_decisive
        if got[:n] != entry.token_ids[:n]:
            step = next((k for k in range(n) if k >= len(got) or got[k] != entry.token_ids[k]), n)
            lines.append(
                f"entry {i} ({len(entry.prompt_token_ids)} prompt tokens): step {step} of {n} "
                f"expected {entry.token_ids[step : step + 3]}, got {got[step : step + 3]} (gap {entry.gaps[step]})"
            )
    return lines
