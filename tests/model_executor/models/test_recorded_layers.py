"""A decoder whose layers are recorded computes what it does layer by layer, to the last bit."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from tiny_checkpoints import hf_model
from tiny_gguf import write_gguf

from ringcore.attention.backends.cpu_attn import CpuAttnBackend
from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.checkpoint import find_model, read_model_spec
from ringcore.config.gguf_weights import with_gguf_weights
from ringcore.distributed.parallel import SingleRank
from ringcore.families import FAMILIES
from ringcore.host.resources import Host
from ringcore.kernels.native.row_kernels import row_kernels
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models import build_model

pytestmark = pytest.mark.skipif(row_kernels() is None, reason="no C compiler")
MAX_LEN, BLOCK = 1200, 16
SIZES = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}


@pytest.fixture(scope="module", params=["packed_int8", "packed", "expanded"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    hf = hf_model("Llama", seed=1, max_position_embeddings=MAX_LEN, **SIZES)
    write_gguf(path, hf, "llama", "Q4_0")
    files = find_model(path)
    spec = with_gguf_weights(read_model_spec(files, FAMILIES), files, request.param, "auto", "cpu", Host())
    made = build_model(spec, SingleRank(), torch.float32, MAX_LEN)
    made.bind(load_weights(made.weights(), files, 0, torch.device("cpu")))
    return request.param, made


class Paged:
    """Sequences of random ids; each has its own blocks."""

    def __init__(self, model, num_seqs: int) -> None:
        self._model, layers = model, model.attention_layers
        spec = layers[0].kv_cache_spec(BLOCK, "float32")
        self._backend = CpuAttnBackend(spec, [layer.spec for layer in layers])
        self._width = -(-MAX_LEN // BLOCK)
        shape = self._backend.kv_cache_shape(num_seqs * self._width + 1)
        self._caches = {layer.index: torch.zeros(shape) for layer in layers}
        self._lens = [0] * num_seqs

    def step(self, counts: dict[int, int]) -> torch.Tensor:
        seqs, query_lens = list(counts), np.array(list(counts.values()))
        firsts = np.array([self._lens[seq] for seq in seqs])
        for seq, count in counts.items():
            self._lens[seq] += count
        positions = np.concatenate([first + np.arange(n) for first, n in zip(firsts, query_lens, strict=True)])
        table = np.array([[1 + seq * self._width + i for i in range(self._width)] for seq in seqs], np.int32)
        blocks = table.repeat(query_lens, 0)[np.arange(len(positions)), positions // BLOCK]
        metadata = AttentionMetadata(
            num_tokens=len(positions),
            num_seqs=len(seqs),
            max_query_len=int(query_lens.max()),
            max_seq_len=int((firsts + query_lens).max()),
            query_start_loc_cpu=np.concatenate(([0], query_lens.cumsum())).astype(np.int32),
            seq_lens_cpu=(firsts + query_lens).astype(np.int32),
            block_table_cpu=table,
            slot_mapping=torch.from_numpy(blocks.astype(np.int64) * BLOCK + positions % BLOCK),
        )
        ctx = ForwardContext((GroupContext.of(metadata, self._backend),), dict.fromkeys(self._caches, 0), self._caches)
        ids = torch.from_numpy(positions * 7 % 50)
        return self._model.forward(ids, torch.from_numpy(positions), ctx)


STEPS = [{0: 1150, 1: 40}, *[{0: 1}] * 6, *[{0: 1, 1: 1}] * 6, *[{1: 2}] * 3, *[{1: 1}] * 2]  # 0 is split (split-KV)


@torch.inference_mode()
def test_results_are_those_of_layers_called_one_by_one(model, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    kind, decoder = model
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        recorded = Paged(decoder, 2)
        found = [recorded.step(step) for step in STEPS]
        monkeypatch.setattr("ringcore.model_executor.models.recorded_layers._MOST_TOKENS", 0)
        one_by_one = Paged(decoder, 2)
        assert all(torch.equal(one_by_one.step(step), ours) for step, ours in zip(STEPS, found, strict=True))
    finally:
        torch.set_num_threads(before)
    assert ("layers are called one by one" in caplog.text) == (kind == "expanded")


@torch.inference_mode()
def test_another_kv_cache_is_another_recording(model):
    _, decoder = model
    first, second = Paged(decoder, 1), Paged(decoder, 1)
    ours = [first.step({0: 1}) for _ in range(6)]
    assert all(torch.equal(second.step({0: 1}), each) for each in ours)
