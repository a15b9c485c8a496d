"""transformers' `generate` on a left-padded batch, with its KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from benchmarks.peers.protocol import Engine, serve_engine


class Transformers(Engine):
    packages: ClassVar[tuple[str, ...]] = ("transformers", "torch", "numpy", "tokenizers")

    def import_library(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._float32 = torch.float32
        self._model_class, self._tokenizer_class = AutoModelForCausalLM, AutoTokenizer

    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        self._tokenizer = self._tokenizer_class.from_pretrained(model, padding_side="left")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self._model = self._model_class.from_pretrained(model, dtype=self._float32).eval()
        # Without an end-of-text id generate() goes on past it, as ignore_eos does. min_new_tokens would instead
        # bar the end-of-text token, and so choose other tokens than the engines it is compared with.
        config = self._model.generation_config
        config.pad_token_id, config.eos_token_id = self._tokenizer.pad_token_id, None

    def generate(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        batch = self._tokenizer(prompts, padding=True, return_tensors="pt")
        width = batch["input_ids"].shape[1]
        ids = self._model.generate(**batch, do_sample=False, use_cache=True, max_new_tokens=max_tokens)[:, width:]
        self._tokenizer.batch_decode(ids, skip_special_tokens=True)  # the others hand back text as well
        token_ids: list[list[int]] = ids.tolist()
        return token_ids


if __name__ == "__main__":
    serve_engine(Transformers())
