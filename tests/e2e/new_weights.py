"""Other weights of the same model, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sleeping import PROMPTS, expected, greedy, token_ids

from ringcore import LLM

TOLERANCE = 0.001  # of log-probabilities and logits: float32, in another order of additions


class OtherWeights:
    """Every tensor of a checkpoint, each of its rows by a random factor of its own: no row is where another belongs,
    and none is as it was. In float32 and bfloat16, by turns."""

    def __init__(self, folder: str, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}
        for index, (name, tensor) in enumerate(sorted(load_file(Path(folder) / "model.safetensors").items())):
            factors = 1 + 0.1 * torch.randn(tensor.shape[0], *[1] * (tensor.ndim - 1), generator=generator)
            self.tensors[name] = (tensor.float() * factors).to(torch.bfloat16 if index % 2 else torch.float32)
        self._folder = folder

    def chunks(self, num_chunks: int) -> Iterator[dict[str, torch.Tensor]]:
        """All of them, in no order of the model's."""
        names = list(self.tensors)
        for index in range(num_chunks):
            yield {name: self.tensors[name] for name in names[index::num_chunks]}

    def check(self, llm: LLM, num_tokens: int = 6) -> None:
        """The engine has these weights: each token it generates, and its log-probability, is that of transformers."""
        outputs = llm.generate(PROMPTS, greedy(num_tokens), use_tqdm=False)
        assert token_ids(outputs) != expected(num_tokens), "other weights, and the same tokens"
        for output in outputs:
            one = output.outputs[0]
            right = self.check_greedy(output.prompt_token_ids, one.token_ids)
            got = [row[token].logprob for row, token in zip(one.logprobs, one.token_ids, strict=True)]
            assert got == pytest.approx(right, abs=TOLERANCE)

    def check_greedy(self, prompt: list[int], tokens: list[int]) -> list[float]:
        """Each of `tokens` is the likeliest one behind those before it; -> their log-probabilities."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(tokens).unsqueeze(-1)
        assert (logits.gather(-1, chosen) > logits.max(-1, keepdim=True).values - TOLERANCE).all()
        return logits.log_softmax(-1).gather(-1, chosen).flatten().tolist()

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=torch.float32)
        missing, unexpected = model.load_state_dict(self.tensors, strict=False)
        assert set(missing) <= {"lm_head.weight"}  # tied to the embedding
        assert not unexpected
        return model.eval()
