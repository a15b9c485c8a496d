"""llama.cpp by the package llama-cpp-python: one batch of sequences, a decode call a step, as its own batched example.

Setting `num_threads`: of its computation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from benchmarks.peers.protocol import Engine, serve_engine

NUM_TOKENS = 128  # of the context of each sequence
MAX_SEQUENCES = 64


class LlamaCpp(Engine):
    packages: ClassVar[tuple[str, ...]] = ("llama-cpp-python", "numpy")

    def import_library(self) -> None:
        import llama_cpp

        self._api = llama_cpp

    def construct(self, model: str, settings: Mapping[str, Any]) -> None:
        api = self._api
        api.llama_backend_init()
        parameters = api.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(model.encode(), parameters)
        if not self._model:
            raise ValueError(f"{model}: llama.cpp does not load it; give a GGUF file")
        self._vocab = api.llama_model_get_vocab(self._model)
        self._vocab_size = api.llama_vocab_n_tokens(self._vocab)
        parameters = api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = NUM_TOKENS * MAX_SEQUENCES
        parameters.n_seq_max = MAX_SEQUENCES
        parameters.n_threads = parameters.n_threads_batch = settings["num_threads"]
        self._context = api.llama_init_from_model(self._model, parameters)
        self._batch = api.llama_batch_init(NUM_TOKENS * MAX_SEQUENCES, 0, 1)

    def generate(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
        prompt_ids = [self._tokens(prompt) for prompt in prompts]
        assert len(prompts) <= MAX_SEQUENCES, len(prompts)
        assert max(map(len, prompt_ids)) + max_tokens <= NUM_TOKENS, "longer than the context"
        entries, ends = [], []
        for sequence, ids in enumerate(prompt_ids):
            entries += [(token, place, sequence, place == len(ids) - 1) for place, token in enumerate(ids)]
            ends.append(len(entries) - 1)
        found: list[list[int]] = [[] for _ in prompts]
        for step in range(max_tokens):
            self._decode(entries)
            for sequence, end in enumerate(ends):
                logits = self._api.llama_get_logits_ith(self._context, end)
                found[sequence].append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
            entries = [(ids[-1], len(prompt_ids[i]) + step, i, True) for i, ids in enumerate(found)]
            ends = list(range(len(found)))
        for ids in found:
            self.text(ids)
        return found

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, place, sequence, has_logits) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, place
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, has_logits
        if self._api.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")

    def _tokens(self, text: str) -> list[int]:
        data = text.encode()
        tokens = (self._api.llama_token * (len(data) + 8))()
        num_tokens = self._api.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), True, True)
        return list(tokens[:num_tokens])

    def text(self, ids: list[int]) -> str:
        tokens, out = (self._api.llama_token * len(ids))(*ids), bytes(64 * len(ids))
        size = self._api.llama_detokenize(self._vocab, tokens, len(ids), out, len(out), False, True)
        return out[: max(0, size)].decode(errors="replace")


if __name__ == "__main__":
    serve_engine(LlamaCpp())
