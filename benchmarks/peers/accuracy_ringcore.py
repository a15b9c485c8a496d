"""Scores a text by one model in several linear schemes: the log-probability of each of its tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gguf_files import write_gguf
from benchmarks.peers.protocol import serve
from benchmarks.peers.rows import facts
from ringcore import LLM, SamplingParams

__all__ = ["AccuracyChild"]


class AccuracyChild:
    def __init__(self) -> None:
        self._model = ""
        self._settings: Mapping[str, Any] = {}

    def commands(self) -> dict[str, Any]:
        return {"load": self.load, "windows": self.windows, "score": self.score}

    def load(self, model: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """settings: engine options for every scheme."""
        self._model, self._settings = model, settings
        return facts(("ringcore", "torch", "gguf"))

    def windows(self, text: str, num_windows: int, num_tokens: int) -> list[list[int]]:
        """The first tokens of a text, in windows of `num_tokens`; fewer where it is too short."""
        from tokenizers import Tokenizer

        ids = Tokenizer.from_file(str(Path(self._model, "tokenizer.json"))).encode(text).ids
        starts = range(0, min(num_windows * num_tokens, len(ids) - num_tokens + 1), num_tokens)
        return [ids[start : start + num_tokens] for start in starts]

    def score(self, windows: Sequence[Sequence[int]], options: Mapping[str, Any], gguf_type: str | None) -> list[float]:
        """Natural logarithms of the probabilities of all tokens but the first of each window. gguf_type: of a file that
        the model is written to, and read from."""
        with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
            model, tokenizer = self._model, None
            if gguf_type is not None:
                model, tokenizer = str(Path(folder, "model.gguf")), self._model
                write_gguf(self._model, Path(model), gguf_type)
            with LLM(model, tokenizer=tokenizer, **self._settings, **options) as llm:
                params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
                prompts = [{"prompt_token_ids": list(ids)} for ids in windows]
                outputs = llm.generate(prompts, params, use_tqdm=False)
        found = []
        for ids, output in zip(windows, outputs, strict=True):
            assert output.prompt_logprobs is not None, "they were asked for"
            for token, scores in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
                assert scores is not None, "only the first token has none"
                found.append(scores[token].logprob)
        return found


if __name__ == "__main__":
    serve(AccuracyChild().commands())
