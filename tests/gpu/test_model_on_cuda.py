"""Models on a GPU, with the kernels that their layers bind there, against the same models on the CPU.

float32 is float32 on both: torch multiplies in TF32 on a GPU only if a caller allows it, and no code here does. The
tolerance, 1e-4 on logits of size 1 to 10, is that of sums in another order.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_attention import DenseRun
from tiny_checkpoints import FAMILY_NAMES, MAX_LEN, hf_model, load, random_ids

from ringcore.attention.backend import AttentionBackend
from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext, GroupContext
from ringcore.attention.metadata import AttentionMetadata
from ringcore.checkpoint import ModelFiles, find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank
from ringcore.families import FAMILIES
from ringcore.model_executor import loader
from ringcore.model_executor.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from ringcore.model_executor.layers.rotary import KernelRotation
from ringcore.model_executor.linear_schemes.dense import all_dense
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.tensor_source import DummySource, SafetensorsSource
from ringcore.model_executor.weight import Uniform, Weight, WeightPart

LENGTH = 120
CHUNKS = ((0, 70), (70, 115), *((at, at + 1) for at in range(115, LENGTH)))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(family, dtype, **config): a random checkpoint."""

    def make(family, dtype=torch.float32, rope="default", **options):
        folder = tmp_path_factory.mktemp(family)
        hf_model(family, rope, **options).to(dtype).save_pretrained(folder, max_shard_size="100KB")
        return folder

    return make


def logits(folder, device, dtype="float32"):
    """[LENGTH, vocab_size] on the CPU: a prompt in two chunks, then single tokens."""
    run = DenseRun(load(folder, dtype=getattr(torch, dtype), device=device), MAX_LEN, 1, dtype)
    ids = random_ids(LENGTH)
    found = torch.cat([run.step({0: ids[begin:end]}) for begin, end in CHUNKS])
    assert found.dtype == torch.float32
    return found.cpu()


def test_tf32_is_not_allowed():
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {}) for family in FAMILY_NAMES),
        *((family, {"tie_word_embeddings": True, "num_key_value_heads": 1}) for family in FAMILY_NAMES),
        ("Llama", {"rope": "llama3", "attention_bias": True, "mlp_bias": True}),
        ("Qwen3", {"rope": "yarn mscale", "head_dim": 32}),
        ("Llama", {"head_dim": 96, "num_attention_heads": 2}),
        ("Gemma3", {"rope": "linear", "head_dim": 256, "query_pre_attn_scalar": 256}),
    ],
    ids=str,
)
def test_float32(folder_of, family, options):
    folder = folder_of(family, **options)
    torch.testing.assert_close(logits(folder, "cuda"), logits(folder, "cpu"), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_16_bits(folder_of, family, dtype):
    """Of the same 16-bit weights, computed in float32, the GPU is hardly further off than the CPU in 16 bits. Of
    experts, by the middle token: a token whose router rounds another way is far off on either.
    """
    folder = folder_of(family, getattr(torch, dtype))
    exact = logits(folder, "cpu").log_softmax(-1)
    on_cpu, on_gpu = (logits(folder, device, dtype).log_softmax(-1) for device in ("cpu", "cuda"))
    gpu_error, cpu_error = ((found - exact).abs() for found in (on_gpu, on_cpu))
    if family == "Qwen3Moe":
        gpu_error, cpu_error = (error.median(0).values for error in (gpu_error, cpu_error))
    assert gpu_error.mean() < 1.2 * cpu_error.mean()
    assert gpu_error.max() < 1.5 * cpu_error.max()


def test_logits_of_16_bits_are_not_rounded(folder_of):
    found = logits(folder_of("Qwen3", torch.bfloat16), "cuda", "bfloat16")
    assert (found.bfloat16().float() != found).double().mean() > 0.9


def test_layers_bind_the_kernels(folder_of):
    from ringcore.kernels import activation, rms_norm

    model = load(folder_of("Gemma3"), device="cuda")
    assert isinstance(model.rotaries[0](torch.zeros(1, dtype=torch.int64, device="cuda")), KernelRotation)
    assert model.layers[0].mlp.inner._gate.activate_and_multiply is activation.gelu_tanh_and_mul
    assert model.layers[0].input_norm._normalise.func is rms_norm.rms_norm


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_weights_arrive_whole(folder_of, monkeypatch, stored, wanted):
    """By pieces of 3 KB, so that each of the two buffers is filled many times while the other is on its way."""
    monkeypatch.setattr(SafetensorsSource, "BUFFER_BYTES", 3000)
    folder = folder_of("Qwen2", stored)
    ours, theirs = (load(folder, dtype=wanted, device=device) for device in ("cuda", "cpu"))
    torch.cuda.synchronize()
    assert torch.equal(ours.embed_tokens.table.cpu(), theirs.embed_tokens.table)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        linear = layer.mlp.down_proj._product
        weight = linear.weight if isinstance(linear, KernelProduct) else linear.multiply.keywords["weight"]
        x = torch.eye(weight.shape[1], dtype=wanted)
        columns = other.mlp.down_proj(x, NO_TOKEN_CONTEXT).float()
        torch.testing.assert_close(weight.t().cpu().float(), columns, atol=0, rtol=0)


@pytest.mark.parametrize("group_elements", [100, 1 << 20])
def test_dummy_weights_are_those_of_the_cpu(monkeypatch, group_elements):
    monkeypatch.setattr(DummySource, "DEVICE_GROUP_ELEMENTS", group_elements)
    weight = Weight("w", (60, 40), torch.bfloat16, (WeightPart("c", (64, 40), 0, 4, 60),), Uniform.of_fan_in(40))
    files = ModelFiles("dummy", "/nowhere", None, [], "/nowhere")
    ours, theirs = (load_weights([weight], files, 7, torch.device(device))["w"] for device in ("cuda", "cpu"))
    assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_weights_that_are_read_ahead_by_several_threads(folder_of, monkeypatch, load_format):
    monkeypatch.setattr(SafetensorsSource, "BUFFER_BYTES", 3000)
    monkeypatch.setattr(loader, "_PIECE_BYTES", 10_000)
    files = find_model(folder_of("Qwen2"), load_format)
    spec = read_model_spec(files, FAMILIES)
    weights = build_model(spec, Place(1, 2), torch.bfloat16, MAX_LEN).weights()

    def poisoned(num_bytes):
        return torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device="cuda")

    ours = load_weights(weights, files, 7, torch.device("cuda", 0), poisoned)
    sums = {name: tensor.sum(dtype=torch.float64) for name, tensor in ours.items()}  # at once, on this thread's stream
    theirs = load_weights(weights, files, 7, torch.device("cpu"))
    for name, tensor in theirs.items():
        assert torch.equal(ours[name].cpu(), tensor), name
        assert float(sums[name]) == pytest.approx(float(tensor.sum(dtype=torch.float64)), abs=1e-3), name


class Place(SingleRank):
    """One of several ranks, whose collectives give its own part."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_the_vocabulary_split_over_ranks(cuda):
    table, ids = torch.randn(11, 16, device=cuda), torch.arange(11, device=cuda)
    total = torch.zeros(11, 16, device=cuda)
    hidden, parts = torch.randn(5, 16, device=cuda), []
    for rank in range(4):
        options = {"dtype": torch.float32, "tp": Place(rank, 4)}
        embedding = VocabParallelEmbedding("embed", "model.embed", 11, 16, **options)
        rows = torch.zeros(3, 16, device=cuda)
        mine = table[3 * rank : 3 * rank + 3]
        rows[: len(mine)] = mine
        embedding.bind({"embed.weight": rows})
        total += embedding(ids)
        head = ParallelLMHead("head", "head", 11, 16, **options, tied=embedding, scheme_of=all_dense)
        head.bind({})
        parts.append(head(hidden, NO_TOKEN_CONTEXT))
    assert torch.equal(total, table)
    torch.testing.assert_close(torch.cat(parts, -1)[:, :11], hidden @ table.T)


class SelfOnly(AttentionBackend):
    """Each token sees itself alone: nothing that a graph could not hold."""

    name = "self only"

    @classmethod
    def refusal(cls, spec, layers, device, sharing_specs=()):
        return None

    def kv_cache_shape(self, num_blocks):
        return (1,)

    def plan(self, metadata):
        return None

    def forward(self, query, key, value, kv_cache, metadata, plan, layer, sinks=None):
        return query + (key + value).repeat_interleave(self.num_heads // self.spec.num_kv_heads, 1)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_forward_pass_is_a_graph(folder_of, cuda, family):
    """Captured once and replayed with other tokens: no launch needs a number that the host does not have before."""
    model = load(folder_of(family, torch.bfloat16), dtype=torch.bfloat16, device="cuda")
    n = 3
    metadata = AttentionMetadata(
        num_tokens=n,
        num_seqs=n,
        max_query_len=1,
        max_seq_len=1,
        query_start_loc_cpu=np.arange(n + 1, dtype=np.int32),
        seq_lens_cpu=np.ones(n, np.int32),
        block_table_cpu=np.zeros((n, 1), np.int32),
        slot_mapping=torch.zeros(n, dtype=torch.int64, device=cuda),
    )
    layers = model.attention_layers
    backend = SelfOnly(layers[0].kv_cache_spec(16, "bfloat16"), [layers[0].spec])
    pages = torch.zeros(1, device=cuda)
    ctx = ForwardContext((GroupContext.of(metadata, backend),), (0,) * len(layers), (pages,) * len(layers))
    ids, positions = (torch.zeros(n, dtype=torch.int64, device=cuda) for _ in range(2))

    def run():
        return model.compute_logits(model.forward(ids, positions, ctx))

    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # compiles the kernels, and sets up what the libraries set up lazily
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for seed in range(3):
            ids.copy_(torch.tensor(random_ids(n, seed)))
            positions.copy_(torch.tensor([seed, 40, 159 - seed]))
            graph.replay()
            assert torch.equal(found, run())
