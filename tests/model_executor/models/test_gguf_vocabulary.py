"""The token table and the head of a GGUF file that stay in its blocks, in models of transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import write_gguf
from thread_tp import on_all_ranks
from written_gguf import HIDDEN, IDS, assert_equal, built, hf, loaded, step, written

from ringcore.checkpoint import find_model
from ringcore.checkpoint.expected_tensors import stored_bytes
from ringcore.distributed.parallel import TensorParallel

Q6_K = 210  # bytes of 256 numbers
ARCHITECTURES = ("qwen3moe", "phi3", "starcoder2", "gemma2", "llama")


def of_vocabulary(model: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        weight.name: (weight.dtype, weight.shape)
        for weight in model.weights()
        if "embed_tokens" in weight.name or "lm_head" in weight.name
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_file_s_bytes_on_one_rank_and_two(tmp_path, architecture):
    """Scaled and softcapped (gemma2), tied or not; 97 rows are 49 and 48 on two ranks."""
    kinds = {"token_embd": "Q6_K", "output": "Q6_K", "ffn_gate_inp": "F32"}
    path = Path(write_gguf(tmp_path, architecture, hf(architecture), "Q4_0", kinds))
    is_tied = hf(architecture).config.tie_word_embeddings
    names = ["model.embed_tokens.weight", *([] if is_tied else ["lm_head.weight"])]
    expected = step(loaded(path, "expanded"))
    for size, rows in ((1, 97), (2, 49)):

        def run(tp: TensorParallel) -> tuple[torch.Tensor, Mapping[str, Any], int]:
            model = loaded(path, "packed", tp)
            return step(model), of_vocabulary(model), sum(weight.nbytes for weight in model.weights())

        for logits, held, num_bytes in on_all_ranks(size, run):
            assert_equal(logits, expected)
            assert held == dict.fromkeys(names, (torch.uint8, (rows, Q6_K)))
            assert num_bytes <= stored_bytes(find_model(path), 4)


def test_rows_are_those_of_the_expanded_table_to_the_last_bit(tmp_path):
    path, ids = written(tmp_path, "gemma2", "Q4_K"), torch.tensor(IDS)
    packed, numbers = (loaded(path, asked)._model.get_input_embeddings() for asked in ("packed", "expanded"))
    assert torch.equal(packed(ids[None]), numbers(ids[None]))
    assert packed(ids[None]).shape == (1, len(ids), HIDDEN)


@pytest.mark.parametrize("kinds", [{"token_embd": "F16"}, {"output": "F16"}])
def test_one_of_both_in_blocks(tmp_path, kinds):
    path = Path(write_gguf(tmp_path, "phi3", hf("phi3"), "Q8_0", kinds))
    for size in (1, 2):
        for logits in on_all_ranks(size, lambda tp: step(loaded(path, "packed", tp))):
            assert_equal(logits, step(loaded(path, "expanded")))
    dtypes = {dtype for dtype, _ in of_vocabulary(loaded(path, "packed")).values()}
    assert dtypes == {torch.uint8, torch.float32}


def test_a_head_with_a_bias_is_read_as_numbers(tmp_path, monkeypatch):
    """No GGUF architecture has one."""
    from transformers.models.phi3.modeling_phi3 import Phi3ForCausalLM

    path = written(tmp_path, "phi3", "Q8_0")
    initialise = Phi3ForCausalLM.__init__

    def with_bias(self: Any, config: Any) -> None:
        initialise(self, config)
        self.lm_head.register_parameter("bias", torch.nn.Parameter(torch.zeros(97)))

    monkeypatch.setattr(Phi3ForCausalLM, "__init__", with_bias)
    held = of_vocabulary(built(path, "packed"))
    assert held["lm_head.weight"] == (torch.float32, (97, HIDDEN))
    assert held["model.embed_tokens.weight"][0] == torch.uint8
