"""A scheme that decorates another one, added by the seam alone: its product adds a low-rank term by each token's
adapter. In one batch, every sequence gets what a model with its adapter merged computes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from dense_attention import DenseRun
from thread_tp import on_all_ranks
from tiny_checkpoints import MAX_LEN, hf_model, load, random_ids, save_with_tensors

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.matrix_tensors import Fixed, Inputs, MatrixTensor, Outputs
from ringcore.families import FAMILIES
from ringcore.model_executor.linear_schemes.dense import Dense
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models import model_class

NUM, RANK = 2, 3  # adapters 1 and 2, each of rank 3
# Prompts, decodes and chunks of three sequences, each with an adapter of its own, in mixed steps.
STEPS = [{0: 6, 1: 4}, {0: 1, 1: 1, 2: 5}, {2: 1, 0: 1, 1: 2}, {1: 1}]


class AdaptedProduct(Product):
    def __init__(self, inner, lengths, a, b):
        """a: [matrices * NUM * RANK, in], b: [out, NUM * RANK]; lengths: outputs of each matrix."""
        self.inner = inner
        self.pairs = list(zip(a.split(NUM * RANK), b.split(lengths), strict=True))

    def __call__(self, x, tokens, out=None):
        product = self.inner(x, tokens)
        if tokens.adapter_ids is not None:
            numbers = torch.arange(1, NUM + 1, device=x.device).repeat_interleave(RANK)
            is_own = (tokens.adapter_ids[:, None] == numbers).to(x.dtype)  # [n, NUM * RANK]
            product = product + torch.cat([(x @ a.T * is_own) @ b.T for a, b in self.pairs], -1)
        return product if out is None else out.copy_(product)


@dataclass(frozen=True)
class Adapted(LinearScheme):
    inner: LinearScheme

    @property
    def tensors(self):
        a = MatrixTensor("lora_a", (Fixed(NUM * RANK), Inputs()))
        return (*self.inner.tensors, a, MatrixTensor("lora_b", (Outputs(), Fixed(NUM * RANK))))

    def product(self, shard, tensors, bias, updatable):
        lengths = [outputs.length for outputs in shard.outputs]
        lengths[-1] += shard.num_padded_outputs
        inner = self.inner.product(shard, tensors, bias, updatable)
        return AdaptedProduct(inner, lengths, tensors["lora_a"], tensors["lora_b"])


@pytest.fixture(scope="module", params=["Llama", "Qwen3", "Gemma3"])
def folders(request, tmp_path_factory):
    """(the folder with the adapters' tensors, the folders with 0, 1 or 2 of them merged)."""
    family, is_tied = request.param, request.param != "Llama"
    options = {"num_hidden_layers": 2, "attention_bias": family == "Llama"}
    model = hf_model(family, tie_word_embeddings=is_tied, **options)
    state = dict(model.state_dict())
    generator = torch.Generator().manual_seed(3)
    adapters = {}
    for name, tensor in state.items():
        if name.endswith("_proj.weight") or name == "lm_head.weight":
            for suffix, shape in (("lora_a", (NUM * RANK, tensor.shape[1])), ("lora_b", (len(tensor), NUM * RANK))):
                adapters[name.replace("weight", suffix)] = torch.randn(shape, generator=generator) / 8
    folder, *merged = (tmp_path_factory.mktemp("adapted") for _ in range(NUM + 2))
    for number, path in enumerate(merged):
        save_with_tensors(path, hf_model(family, **options), with_adapter(state, adapters, number))
    if is_tied:
        state.pop("lm_head.weight")
    save_with_tensors(folder, model, state | adapters)
    return folder, merged


def with_adapter(state, adapters, number):
    """The tensors with an adapter merged; 0: none."""
    own = slice((number - 1) * RANK, number * RANK) if number else slice(0)
    merged = {name: tensor.clone() for name, tensor in state.items()}
    for matrix in {name.rpartition(".")[0] for name in adapters}:
        merged[f"{matrix}.weight"] += adapters[f"{matrix}.lora_b"][:, own] @ adapters[f"{matrix}.lora_a"][own]
    return merged


def adapted_logits(folder, tp, adapter_of_seq):
    files = find_model(folder)
    spec = read_model_spec(files, FAMILIES)
    model = model_class(spec.architecture)(spec, tp, torch.float32, MAX_LEN, lambda name: Adapted(Dense()))
    model.bind(load_weights(model.weights(), files, 0, torch.device("cpu")))
    return by_sequence(DenseRun(model, MAX_LEN, 3), adapter_of_seq, (0, 1, 2))


def by_sequence(run, adapter_of_seq, seqs):
    """[tokens, vocab_size] of each of `seqs`, in the steps of all."""
    run.adapter_of_seq = adapter_of_seq
    found = {seq: [] for seq in seqs}
    for number, step in enumerate(STEPS):
        tokens = {seq: random_ids(count, seed=10 * number + seq) for seq, count in step.items() if seq in found}
        if tokens:
            parts = run.step(tokens).split([len(ids) for ids in tokens.values()])
            for seq, part in zip(tokens, parts, strict=True):
                found[seq].append(part)
    return [torch.cat(parts) for parts in found.values()]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("adapter_of_seq", [(0, 1, 2), (2, 2, 1), None], ids=str)
def test_each_token_has_its_adapter(folders, size, adapter_of_seq):
    folder, merged = folders
    models = [load(path) for path in merged]
    expected = [
        by_sequence(DenseRun(models[adapter], MAX_LEN, 3), None, (seq,))[0]
        for seq, adapter in enumerate(adapter_of_seq or (0, 0, 0))
    ]
    for found in on_all_ranks(size, lambda tp: adapted_logits(folder, tp, adapter_of_seq)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=3e-4, rtol=1e-5)


def test_adapters_matter(folders):
    _, merged = folders
    first, *others = (by_sequence(DenseRun(load(path), MAX_LEN, 3), None, (0,))[0] for path in merged)
    assert all((first - other).abs().max() > 0.1 for other in others)
