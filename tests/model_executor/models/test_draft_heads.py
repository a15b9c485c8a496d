"""Heads split over ranks compute what they compute on one."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from dense_attention import DenseAttention
from safetensors.torch import save_file
from thread_tp import on_all_ranks
from tiny_heads import HIDDEN, VOCAB, write_head
from tiny_mtp import MtpReference

from ringcore.attention.context import ForwardContext, GroupContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.checkpoint import find_model
from ringcore.checkpoint.eagle_head import read_eagle_head
from ringcore.checkpoint.mtp_head import mtp_tensors, read_mtp_head, read_transformers_mtp_head
from ringcore.checkpoint.spec_reader import read_model_spec
from ringcore.distributed.parallel import SingleRank
from ringcore.families import FAMILIES
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import build_head

NUM_TOKENS = 9


def eagle_head(folder, model):
    return read_eagle_head(find_model(write_head(folder)), model)


def mtp_head(folder, model):
    """Random, in a file of its own."""
    model = msgspec.structs.replace(model, architecture="MiMoForCausalLM", attention_bias=True)
    files, family = find_model(write_head(folder)), FAMILIES[model.architecture]
    head = read_mtp_head(msgspec.structs.replace(files, kind="dummy"), model, family)
    head, shapes = msgspec.structs.replace(head, files=files), mtp_tensors(head, family)
    generator = torch.Generator().manual_seed(2)
    save_file(
        {name: 0.15 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, files.weight_files[0]
    )
    return head


def transformers_mtp_head(folder, model):
    files = find_model(MtpReference("glm4_moe").save(folder / "glm"))
    return read_transformers_mtp_head(files, read_model_spec(files, FAMILIES))


@pytest.mark.parametrize(
    ("make", "expert_parallel"),
    [(eagle_head, False), (mtp_head, False), (transformers_mtp_head, False), (transformers_mtp_head, True)],
)
def test_two_ranks(checkpoint, tmp_path, make, expert_parallel):
    _, model = checkpoint("Llama", hidden_size=HIDDEN, vocab_size=VOCAB)
    spec = make(tmp_path, read_model_spec(find_model(model), FAMILIES))
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(3))
    alone = run(spec, table, SingleRank())
    for stream, drafts in on_all_ranks(2, lambda tp: run(spec, table, tp, expert_parallel)):
        torch.testing.assert_close(stream, alone[0], atol=1e-4, rtol=0)
        assert torch.equal(drafts, alone[1])


@torch.inference_mode()
def run(spec, table, tp, expert_parallel=False):
    head = build_head(spec, 0, tp, torch.float32, 64, NUM_TOKENS, expert_parallel=expert_parallel)
    with pending_weights(head.weights(), spec.files, 0, table.device, may_ignore=lambda name: True) as tensors:
        head.bind(tensors, lambda ids: table[ids], lambda hidden: hidden @ table.T)
    backend = DenseAttention(head.attention.kv_cache_spec(64, "float32"), [head.attention.spec])
    lens = np.array([NUM_TOKENS], dtype=np.int32)
    step = AttentionMetadata(
        num_tokens=NUM_TOKENS,
        num_seqs=1,
        max_query_len=NUM_TOKENS,
        max_seq_len=NUM_TOKENS,
        query_start_loc_cpu=np.array([0, NUM_TOKENS], dtype=np.int32),
        seq_lens_cpu=lens,
        block_table_cpu=np.zeros((1, 1), dtype=np.int32),
        slot_mapping=torch.arange(NUM_TOKENS),
    )
    cache = torch.zeros(backend.kv_cache_shape(1))
    ctx = ForwardContext((GroupContext.of(step, backend),), {0: 0}, {0: cache})
    tapped = torch.randn(NUM_TOKENS, spec.num_taps * HIDDEN, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(NUM_TOKENS)
    stream = head.forward(positions + 7, head.features(tapped), positions, ctx)
    return stream.clone(), head.draft(stream)
