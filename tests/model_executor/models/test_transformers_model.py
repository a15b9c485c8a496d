"""Models of transformers over our attention: what is built, what is loaded, what is refused and why."""

from __future__ import annotations

import functools
import json
import operator
import re
import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dense_attention import DenseRun
from gguf_models import write_gguf
from raw_files import phi3_gguf
from thread_tp import on_all_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface

from ringcore.checkpoint import TransformersSpec, find_model, read_model_spec
from ringcore.distributed.parallel import SingleRank, Stage, TensorParallel
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.models.transformers import construction
from ringcore.model_executor.models.transformers.attention_calls import RECORD, AttentionCall, record
from ringcore.model_executor.models.transformers.attention_layers import attention_layers
from ringcore.model_executor.models.transformers.body import Body
from ringcore.model_executor.models.transformers.construction import build_on_meta, make_buffers
from ringcore.model_executor.models.transformers.folder_check import check_folder
from ringcore.model_executor.models.transformers.fusion import fused_model
from ringcore.model_executor.models.transformers.fusion.recognised import Recognised
from ringcore.model_executor.models.transformers.needs import Need
from ringcore.protocol.folder_check import FolderCheckStart

pytestmark = pytest.mark.sampled

VOCABULARY, CPU = 97, torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}


def config_of(model_type: str, **options: Any):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type](**SIZES | options)


def theirs(folder, model_type: str, **options: Any):
    """A random model of transformers, saved in the folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(model_type, **options), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(folder)
    return model


def built(
    folder, tp: TensorParallel | None = None, dtype: torch.dtype = torch.float32, load_format: str = "dummy"
) -> Any:
    spec = read_model_spec(find_model(folder, load_format), FAMILIES, "transformers")
    return build_model(spec, tp or SingleRank(), dtype, 64)


def loaded(folder, tp: TensorParallel | None = None, load_format: str = "auto") -> Any:
    model = built(folder, tp, load_format=load_format)
    model.bind(load_weights(model.weights(), find_model(folder, load_format), 0, CPU))
    return model


def written(folder, model_type: str, **options: Any):
    config_of(model_type, **options).save_pretrained(folder)
    return folder


def logits_of(model, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([ids]), use_cache=False).logits[0]


PROMPTS = [[5, 9, 14, 3, 77, 21, 8], [40], [6, 5, 4, 90, 12, 13, 60, 33, 2, 17, 54]]


@pytest.mark.parametrize("model_type", ["olmo2", "granite"])
def test_sequences_of_one_step_are_those_of_transformers_and_not_those_of_wrong_boundaries(tmp_path, model_type):
    reference = torch.cat([logits_of(theirs(tmp_path, model_type), ids) for ids in PROMPTS])
    model = loaded(tmp_path)
    together = DenseRun(model, 64, 3, device=CPU).step(dict(enumerate(PROMPTS)))
    torch.testing.assert_close(together, reference, atol=1e-4, rtol=1e-4)
    as_one = DenseRun(model, 64, 1, device=CPU).step({0: functools.reduce(operator.iadd, PROMPTS, [])})
    assert (as_one - reference).abs().max() > 0.1


def test_two_ranks_share_heads_and_each_expert(tmp_path):
    hf = theirs(tmp_path, "qwen3_moe", **EXPERTS)
    ids = PROMPTS[2]

    def run(tp: TensorParallel) -> tuple[Any, torch.Tensor]:
        model = loaded(tmp_path, tp)
        return model, DenseRun(model, 64, 1, device=CPU).step({0: ids})

    for model, logits in on_all_ranks(2, run):
        torch.testing.assert_close(logits, logits_of(hf, ids), atol=1e-4, rtol=1e-4)
        assert {(layer.num_heads, layer.num_kv_heads) for layer in model.attention_layers} == {(2, 1)}
        shapes = {weight.name: weight.shape for weight in model.weights()}
        assert shapes["layers.0.qkv_proj.weight"] == (16 + 8 + 8, 32)
        assert shapes["layers.0.o_proj.weight"] == (32, 16)
        assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (4 * 2 * 8, 32)
        assert shapes["model.layers.0.mlp.experts.down_proj"] == (4 * 32, 8)


SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4,
    "head_dim": 8,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCABULARY,
}
SPARSE = {"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.9, 0.0] * 2, "laurel_rank": 4}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("model_type", "options"), [("gemma4_text", SHARED), ("gemma3n_text", SHARED | SPARSE)])
def test_layers_share_the_keys_and_values_of_others(tmp_path, model_type, options, num_ranks):
    """Gemma 3n besides has activations whose threshold is that of a whole row: its ranks share no such MLP."""
    hf = theirs(tmp_path, model_type, **options)
    reference = torch.cat([logits_of(hf, ids) for ids in PROMPTS])

    def run(tp: TensorParallel) -> tuple[Any, torch.Tensor]:
        model = loaded(tmp_path, tp)
        return model, DenseRun(model, 64, 3, device=CPU).step(dict(enumerate(PROMPTS)))

    for model, logits in on_all_ranks(num_ranks, run):
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)
        assert [layer.index for layer in model.attention_layers] == [0, 1]  # all that the KV cache plan sees
        calls = {call.layer_idx: (layer.index, layer.shares_kv) for call, layer in model._layers.items()}
        assert calls == {0: (0, False), 1: (1, False), 2: (0, True), 3: (1, True)}
        assert model.report().num_layers == 4


@pytest.mark.parametrize(("model_type", "options"), [("gemma4_text", SHARED), ("gemma3n_text", SHARED | SPARSE)])
def test_layers_that_share_nothing_have_a_cache_each(tmp_path, model_type, options):
    written(tmp_path, model_type, **options | {"num_kv_shared_layers": 0})
    layers = built(tmp_path).attention_layers
    assert [(layer.index, layer.shares_kv) for layer in layers] == [(index, False) for index in range(4)]


@pytest.mark.parametrize(
    ("change", "index"),
    [({}, 0), ({"sliding_window": 8}, 2), ({"scale": 2.0}, 2), ({"softcap": 5.0}, 2), ({"has_sinks": True}, 2)],
)
def test_layers_that_differ_share_no_cache(change, index):
    """The blocks of another window are freed at other times, and a backend is told of the source alone."""
    call = AttentionCall(nn.Module(), 4, 2, 8, 8, 1.0, 4, None, None, False)
    calls = [call, call, replace(call, **change, kv_source=0)]
    layers = attention_layers(calls, calls, 1, {}, {2: 0})
    assert [layer.index for layer in layers] == [0, 1, index]
    assert [layer.shares_kv for layer in layers] == [False, False, index == 0]
    (ours,) = attention_layers([call], [call], 1, {}, {})
    assert not attention_layers(calls, calls, 1, {0: ours}, {2: 0})[2].shares_kv  # ours writes keys as it likes


def test_keys_that_a_layer_writes_to_again_are_not_shared():
    recorded: list[Any] = []
    query, key = torch.empty(1, 2, 3, 4, device="meta"), torch.empty(1, 2, 3, 4, device="meta")
    call = AttentionInterface()[RECORD]
    for _ in range(2):
        call(nn.Module(), query, key, key, None, ringcore=recorded)
    key.mul_(2)
    call(nn.Module(), query, key, key, None, ringcore=recorded)
    call(nn.Module(), query, key.clone(), key, None, ringcore=recorded)
    assert [one.kv_source for one in recorded] == [None, 0, None, None]


def test_stages_that_would_part_layers_with_one_kv_cache_are_refused(tmp_path):
    written(tmp_path, "gemma3n_text", **SHARED | SPARSE)
    spec = read_model_spec(find_model(tmp_path, "dummy"), FAMILIES, "transformers")
    with pytest.raises(ModelLoadError, match=r"layers\.2 reads keys and values of an earlier layer"):
        build_model(spec, SingleRank(), torch.float32, 64, stage=Stage(1, 2))


def test_two_ranks_read_their_slices_of_a_gguf_file(tmp_path):
    hf, ids = theirs(tmp_path, "qwen3_moe", **EXPERTS, norm_topk_prob=True), PROMPTS[2]
    path = write_gguf(tmp_path, "qwen3moe", hf)

    def run(tp: TensorParallel) -> torch.Tensor:
        return DenseRun(loaded(path, tp), 64, 1, device=CPU).step({0: ids})

    for logits in on_all_ranks(2, run):
        torch.testing.assert_close(logits, logits_of(hf, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_tied", [True, False])
def test_two_ranks_share_the_vocabulary(tmp_path, is_tied):
    hf = theirs(tmp_path, "olmo2", tie_word_embeddings=is_tied, vocab_size=96)

    def run(tp: TensorParallel) -> tuple[list[tuple[int, ...]], torch.Tensor]:
        model = loaded(tmp_path, tp)
        tables = [weight.shape for weight in model.weights() if "embed" in weight.name or "head" in weight.name]
        return tables, DenseRun(model, 64, 1, device=CPU).step({0: PROMPTS[0]})

    for tables, logits in on_all_ranks(2, run):
        assert tables == [(48, 32)] * (1 if is_tied else 2)
        torch.testing.assert_close(logits, logits_of(hf, PROMPTS[0]), atol=1e-4, rtol=1e-4)


class Rank(TensorParallel):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor):
        raise AssertionError("nothing is sent while a model is built")

    all_gather_last_dim = all_reduce


def test_ranks_that_cannot_share_the_heads_are_refused(tmp_path, monkeypatch):
    """Where attention is the model's own; ours has a KV head on several ranks."""
    written(tmp_path, "llama", num_key_value_heads=1)
    assert [(one.num_heads, one.num_kv_heads) for one in built(tmp_path, Rank(0, 4)).attention_layers] == [(1, 1)] * 2
    monkeypatch.setattr(fused_model, "recognise", lambda *_: Recognised())
    with pytest.raises(ModelLoadError, match=r"llama: .*(cannot be split over 4 ranks|pass without values fails)"):
        built(tmp_path, Rank(0, 4))


def test_a_package_that_is_missing_is_what_a_model_needs(tmp_path, monkeypatch):
    def build(*_):
        raise ImportError("TimmWrapperModel requires the timm library")

    monkeypatch.setattr(construction, "build_on_meta", build)
    with pytest.raises(ModelLoadError, match="ImportError: TimmWrapperModel requires the timm library") as caught:
        built(written(tmp_path, "llama"))
    assert caught.value.details["need"] == Need.PACKAGE.name


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]}
REFUSED = {
    "qwen3_next": ({"head_dim": 8}, "tokens meet outside attention, in convolution", Need.REQUEST_STATE),
    "bamba": (BAMBA, "in convolution", Need.REQUEST_STATE),  # its file has an infinity
    "bloom": ({"max_position_embeddings": 64}, "in baddbmm", Need.INTERFACE),
    "falcon": ({}, "its own code", Need.INTERFACE),
    "roberta": ({"is_decoder": True}, "cumsum", Need.POSITIONS),
    "bert": ({}, "looks at later tokens|neither causal", Need.DECODER),
    "xmod": ({"is_decoder": True}, "without values fails in XmodModel: ValueError", Need.NO_VALUES),
    "diffllama": ({}, "4 attention calls in 2 layers", Need.ONE_CALL),
    "phi3": (
        {"rope_parameters": LONG, "original_max_position_embeddings": 32},
        "in max|changes the model itself",
        Need.INDEPENDENCE,
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_would_be_computed_wrongly_is_refused_with_the_reason(tmp_path, model_type):
    options, reason, need = REFUSED[model_type]
    with pytest.raises(ModelLoadError, match=f"^{model_type}: .*({reason}).*cannot be served yet") as caught:
        built(written(tmp_path, model_type, **options))
    assert caught.value.details["need"] == need.name


@pytest.mark.parametrize("fused", ["nothing", "sublayers", "layers"])
@pytest.mark.parametrize("model_type", ["stablelm", "nemotron"])
def test_layers_that_keep_their_keyword_arguments_hand_down_the_mask(tmp_path, monkeypatch, model_type, fused):
    recognise = fused_model.recognise
    if fused == "nothing":
        monkeypatch.setattr(fused_model, "recognise", lambda *_: Recognised())
    if fused == "sublayers":
        monkeypatch.setattr(fused_model, "recognise", lambda *given: replace(recognise(*given), plans={}))
    reference, model = theirs(tmp_path, model_type), loaded(tmp_path)
    counted = model.report().fused
    assert counted["attentions"] == (0 if fused == "nothing" else 2)
    assert counted["layers"] == (2 if fused == "layers" else 0)
    found = DenseRun(model, 64, 3, device=CPU).step(dict(enumerate(PROMPTS)))
    expected = torch.cat([logits_of(reference, ids) for ids in PROMPTS])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_layers_that_keep_the_mask_too_are_refused(tmp_path, monkeypatch):
    from transformers.models.stablelm.modeling_stablelm import StableLmAttention

    forward = StableLmAttention.forward
    without = lambda self, hidden_states, attention_mask, **rest: forward(self, hidden_states, **rest)  # noqa: E731
    monkeypatch.setattr(StableLmAttention, "forward", without)
    with pytest.raises(ModelLoadError, match="does not pass its keyword arguments on to its attention") as caught:
        built(written(tmp_path, "stablelm"))
    assert caught.value.details["need"] == Need.INTERFACE.name


def test_windows_are_read_from_the_masks(tmp_path):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    options = {"head_dim": 8, "sliding_window": 5, "layer_types": kinds, "num_hidden_layers": 3}
    layers = built(written(tmp_path, "cohere2", **options)).attention_layers
    assert [layer.sliding_window for layer in layers] == [5, None, 5]
    assert [layer.index for layer in layers] == [0, 1, 2]


LLAMA4 = {
    "num_hidden_layers": 3,
    "no_rope_layers": [1, 1, 0],  # the last has neither chunks nor rotations, and scales queries by their position
    "attention_chunk_size": 4,
    "floor_scale": 3,
    "attn_scale": 0.9,
    "num_local_experts": 2,
    "moe_layers": [1],
    "intermediate_size_mlp": 48,
    "head_dim": 8,
}


def test_chunks_are_read_from_the_masks(tmp_path):
    layers = built(written(tmp_path, "llama4_text", **LLAMA4)).attention_layers
    assert [(layer.chunk_size, layer.sliding_window) for layer in layers] == [(4, None), (4, None), (None, None)]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama4_text", LLAMA4),
        ("phimoe", {"num_local_experts": 2}),  # computes the largest position, and does not use it
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),  # numbers its positions by a sum over a mask of ones
    ],
)
def test_in_two_steps_of_several_sequences(tmp_path, model_type, options):
    """The count of a row's tokens is no position."""
    reference = torch.cat([logits_of(theirs(tmp_path, model_type, **options), ids) for ids in PROMPTS])
    run = DenseRun(loaded(tmp_path), 64, 3, device=CPU)
    first = run.step({0: PROMPTS[0][:5], 1: PROMPTS[1], 2: PROMPTS[2][:6]})
    rest = run.step({0: PROMPTS[0][5:], 2: PROMPTS[2][6:]})
    together = torch.cat([first[:5], rest[:2], first[5:6], first[6:], rest[2:]])
    torch.testing.assert_close(together, reference, atol=1e-4, rtol=1e-4)


def test_tensors_that_it_makes_are_on_the_device_of_the_step():
    """A CUDA graph holds no copy from the host."""
    body = Body(build_on_meta(config_of("phimoe", num_local_experts=2).to_dict(), torch.float32, RECORD))
    record(body, 64)

    class Devices(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found = set[str]()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            self.found.update(leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
            return out

    ids = torch.zeros(3, dtype=torch.long, device="meta")
    recorded: list[Any] = []
    with Devices() as devices:
        body(ids, ids, recorded)
    assert devices.found == {"meta"}
    body.makes_tensors = False
    with Devices() as devices:
        body(ids, ids, recorded)
    assert devices.found == {"meta", "cpu"}


@pytest.mark.parametrize("is_fused", [False, True])
def test_two_ranks_have_the_sinks_of_their_heads(tmp_path, monkeypatch, is_fused):
    if not is_fused:
        monkeypatch.setattr(fused_model, "recognise", lambda *_: Recognised())
    hf = theirs(tmp_path, "granite_swa", sliding_window=5)

    def run(tp: TensorParallel) -> tuple[set[tuple[int, ...]], torch.Tensor]:
        model = loaded(tmp_path, tp)
        sinks = {weight.shape for weight in model.weights() if "sinks" in weight.name}
        return sinks, DenseRun(model, 64, 1, device=CPU).step({0: PROMPTS[2]})

    for sinks, logits in on_all_ranks(2, run):
        assert sinks == {(2,)}
        torch.testing.assert_close(logits, logits_of(hf, PROMPTS[2]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
        ("gpt_neox", {}),
        ("gpt2", GPT2),
        ("gemma3_text", {"head_dim": 8}),
        ("granite", {}),
        ("qwen3_moe", EXPERTS),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_and_dtypes_are_those_of_a_model_that_transformers_builds(model_type, options, dtype):
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_config(config_of(model_type, **options), dtype=dtype)
    ours = build_on_meta(config_of(model_type, **options).to_dict(), dtype, RECORD)
    make_buffers(ours)
    assert {n: p.dtype for n, p in ours.named_parameters()} == {n: p.dtype for n, p in hf.named_parameters()}
    buffers = dict(ours.named_buffers())
    assert buffers.keys() == dict(hf.named_buffers()).keys()
    for name, buffer in hf.named_buffers():
        if name not in hf.state_dict():
            torch.testing.assert_close(buffers[name], buffer, atol=0, rtol=0)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox", "qwen3_moe"])
def test_nothing_is_left_on_meta(tmp_path, model_type):
    written(tmp_path, model_type, **{"gpt2": GPT2, "qwen3_moe": EXPERTS}.get(model_type, {}))
    model = built(tmp_path)
    model.bind(load_weights(model.weights(), find_model(tmp_path, "dummy"), 0, CPU), updatable=True)
    tensors = [*model._model.named_parameters(), *model._model.named_buffers()]
    assert not [name for name, tensor in tensors if tensor.is_meta]


def test_building_changes_nothing_that_another_thread_sees(tmp_path):
    """The kernel warm-up builds models while the main thread does."""
    written(tmp_path, "olmo2")
    seen: set[torch.dtype] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.add(torch.get_default_dtype())
            seen.add(torch.empty(1).dtype)

    watcher = threading.Thread(target=watch)
    watcher.start()
    builders = [threading.Thread(target=built, args=(tmp_path, None, torch.bfloat16)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    done.set()
    watcher.join()
    assert seen == {torch.float32}
    assert not hasattr(torch.nn.Module, "smart_apply") or "ringcore" not in torch.nn.Module.smart_apply.__module__


def test_experts_of_the_checkpoint_fill_one_tensor(tmp_path):
    hf = theirs(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    weights = {weight.name: weight for weight in built(tmp_path).weights()}
    parts = weights["model.layers.1.mlp.experts.gate_up_proj"].parts
    assert [part.checkpoint_name.split("experts.")[1] for part in parts[:3]] == [
        "0.w1.weight",
        "0.w3.weight",
        "1.w1.weight",
    ]
    assert [part.offset for part in parts[:3]] == [0, 48, 96]
    experts = loaded(tmp_path)._model.model.layers[1].mlp.experts
    torch.testing.assert_close(experts.gate_up_proj, hf.model.layers[1].mlp.experts.gate_up_proj, atol=0, rtol=0)
    torch.testing.assert_close(experts.down_proj, hf.model.layers[1].mlp.experts.down_proj, atol=0, rtol=0)


def test_names_without_that_of_the_body_are_read(tmp_path):
    """As the files of models that were saved without their head have them."""
    from safetensors.torch import load_file, save_file

    hf, file = theirs(tmp_path, "gpt2", **GPT2), tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    assert "wte.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    logits = DenseRun(loaded(tmp_path), 64, 1, device=CPU).step({0: PROMPTS[0]})
    torch.testing.assert_close(logits, logits_of(hf, PROMPTS[0]), atol=1e-4, rtol=1e-4)


def test_what_transformers_leaves_out_of_a_checkpoint_may_be_left_out(tmp_path):
    model = built(written(tmp_path, "glm4_moe", n_routed_experts=4, head_dim=8, num_experts_per_tok=2))
    assert model.may_ignore("model.layers.92.eh_proj.weight")
    assert not model.may_ignore("model.layers.0.extra")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
        ({"model.norm.weight": torch.ones(7)}, r"safetensors: tensor 'model.norm.weight' has the shape \[7\].*\[32\]"),
        ({"model.layers.0.extra": torch.ones(3)}, "safetensors: tensor 'model.layers.0.extra' has no place"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_tensor_and_file(tmp_path, changed, match):
    from safetensors.torch import load_file, save_file

    theirs(tmp_path, "olmo2")
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in (load_file(file) | changed).items() if tensor is not None}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=match):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({}, None),
        ({"blk.1.ffn_down.weight": None}, "tensor 'model.layers.1.mlp.down_proj.weight' is missing"),
        ({"output_norm.weight": np.zeros(7)}, r"x.gguf: tensor 'model.norm.weight' has the shape \[7\], .* \[32\]"),
        ({"blk.0.extra.weight": np.zeros(3)}, "not known for 'phi3', the first is 'blk.0.extra.weight'"),
    ],
)
def test_a_gguf_file_must_have_the_tensors_of_the_model_before_a_worker_starts(tmp_path, changed, match):
    files = find_model(phi3_gguf(tmp_path / "x.gguf", changed))
    spec = read_model_spec(files, FAMILIES)
    assert isinstance(spec, TransformersSpec)
    with nullcontext() if match is None else pytest.raises(ModelLoadError, match=match):
        check_folder(FolderCheckStart(spec, files))


def test_tensors_with_a_place_of_their_own_are_computed_from_where_they_are(tmp_path):
    """As sleep and weight updates need it: new contents at the same addresses are the model's."""
    theirs(tmp_path, "olmo2", tie_word_embeddings=True)
    model = built(tmp_path)
    tensors = load_weights(model.weights(), find_model(tmp_path), 0, CPU)
    kept = dict(tensors)
    model.bind(tensors, updatable=True)
    assert not tensors
    before = DenseRun(model, 64, 1, device=CPU).step({0: PROMPTS[0]})
    kept["model.embed_tokens.weight"].mul_(2)
    model.refresh()
    after = DenseRun(model, 64, 1, device=CPU).step({0: PROMPTS[0]})
    assert not torch.allclose(before, after)
    assert "lm_head.weight" not in kept  # it is the embedding's


def test_a_configuration_that_says_another_vocabulary_is_refused(tmp_path):
    written(tmp_path, "olmo2")
    spec = read_model_spec(find_model(tmp_path, "dummy"), FAMILIES, "transformers")
    raw = json.loads(spec.config) | {"vocab_size": VOCABULARY + 1}
    other = type(spec)(**{f: getattr(spec, f) for f in spec.__struct_fields__} | {"config": json.dumps(raw)})
    with pytest.raises(ModelLoadError, match=re.escape("it has 98 logits, but its configuration says vocab_size 97")):
        build_model(other, SingleRank(), torch.float32, 64)
