"""Qwen3-MoE with quantized experts, each matrix by itself in the checkpoint: the logits of transformers with what the
codes mean and inputs rounded as the format asks, on one rank and on two; new weights; and what is refused."""

from __future__ import annotations

import functools
import json
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_attention import DenseRun
from quantized_checkpoints import ROUNDS_INPUTS, config_of, is_quantized, rounded_inputs, store
from safetensors.torch import load_file, save_file
from thread_tp import on_all_ranks

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.expected_tensors import check_checkpoint
from ringcore.checkpoint.quantization.shares import refused_shares
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor.linear_schemes.block_kernels import block_kernels
from ringcore.model_executor.loader import load_weights, pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.weight_update import WeightUpdate
from ringcore.protocol.expert_placement import ExpertPlacement

CPU = torch.device("cpu")
IDS = torch.randint(97, (64,), generator=torch.Generator().manual_seed(5)).tolist()
KINDS = ("fp8 block", "int8", "w4 asym", "awq", "gptq order")
SIZE = 96  # of an expert: the share of the second of two ranks begins within a block of 32 outputs
WIDE = 128  # of which each of two ranks has whole groups


def random_model(size: int) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        moe_intermediate_size=size, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
        norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.12)
    return model


def expert_forward(module: Any, kind: str, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
    """As transformers' own, of rounded inputs."""
    out = torch.zeros_like(x)
    for token, index in ((token, index) for token in range(len(x)) for index in range(chosen.shape[1])):
        expert = int(chosen[token, index])
        row = rounded_inputs(kind, x[token : token + 1], None)
        gate, up = F.linear(row, module.gate_up_proj[expert]).chunk(2, -1)
        inner = rounded_inputs(kind, F.silu(gate) * up, None)
        out[token] += weights[token, index] * F.linear(inner, module.down_proj[expert])[0]
    return out


@torch.no_grad()
def save(folder, kind: str, size: int) -> torch.Tensor:
    """-> the logits of transformers."""
    model = random_model(size)
    model.save_pretrained(folder)
    tensors, modules = {}, dict(model.named_modules())
    for name, tensor in load_file(folder / "model.safetensors").items():
        matrix = name.removesuffix(".weight")
        if not is_quantized(kind, matrix) or matrix == name:
            tensors[name] = tensor.clone()
            continue
        stored = store(kind, tensor.float(), seed=len(tensors))
        tensors |= {f"{matrix}.{suffix}": part.contiguous() for suffix, part in stored.tensors.items()}
        if ".experts." not in matrix:
            modules[matrix].weight.copy_(stored.expanded)
            modules[matrix].register_forward_pre_hook(lambda _, args: (rounded_inputs(kind, args[0], None),))
            continue
        path, expert, leaf = matrix.rsplit(".", 2)
        if leaf == "down_proj":
            modules[path].down_proj[int(expert)] = stored.expanded
        else:
            first = size * (leaf == "up_proj")
            modules[path].gate_up_proj[int(expert), first : first + size] = stored.expanded
    for layer in model.model.layers:
        layer.mlp.experts.forward = functools.partial(expert_forward, layer.mlp.experts, kind)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": config_of(kind)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return model(torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    @functools.cache
    def of(kind: str, size: int = SIZE) -> Any:
        folder = tmp_path_factory.mktemp("quantized")
        return folder, save(folder, kind, size)

    return of


def loaded(folder, tp, expert_parallel, **options: Any) -> Any:
    """By an update of random weights, which derived numbers follow."""
    files = find_model(folder)
    spec = read_model_spec(files, FAMILIES)
    check_checkpoint(files, spec, FAMILIES)
    model = build_model(spec, tp, torch.float32, 64, expert_parallel=expert_parallel, **options)
    tensors = load_weights(model.weights(), find_model(folder, "dummy"), 0, CPU, new_memory)
    model.bind(dict(tensors), updatable=True)
    update = WeightUpdate(model.weights(), tensors, model.elsewhere)
    for name, tensor in load_file(folder / "model.safetensors").items():
        update.take(name, tensor)
    update.check_complete()
    update.finish()
    model.refresh()
    return model


def new_memory(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


class Popped:
    """What was popped, and is not kept alive."""

    def __init__(self, tensors: Any) -> None:
        self._tensors, self.seen = tensors, {}

    def __len__(self) -> int:
        return len(self._tensors)

    def pop(self, name: str) -> torch.Tensor:
        tensor = self._tensors.pop(name)
        self.seen[name] = weakref.ref(tensor)
        return tensor


def packed(folder, tp, expert_parallel=False) -> tuple[Any, list[str]]:
    """As an engine without sleep mode loads it on a CPU; and the experts' tensors that are still there."""
    files = find_model(folder)
    spec = read_model_spec(files, FAMILIES)
    check_checkpoint(files, spec, FAMILIES)
    model = build_model(spec, tp, torch.float32, 64, expert_parallel=expert_parallel)
    with pending_weights(model.weights(), files, 0, CPU, may_ignore=model.may_ignore) as tensors:
        model.bind(popped := Popped(tensors))
    return model, [name for name, tensor in popped.seen.items() if ".experts." in name and tensor() is not None]


def tolerance(kind: str) -> float:
    return 0.1 if kind in ROUNDS_INPUTS else 3e-4


@pytest.mark.skipif(block_kernels() is None, reason="no C compiler")
@pytest.mark.parametrize(
    ("kind", "size", "ranks", "expert_parallel"),
    [
        *((kind, SIZE, 1, False) for kind in ("int8", "w4 asym", "awq", "gptq order")),
        *((kind, SIZE, 2, True) for kind in ("awq", "gptq order")),
        ("gptq", WIDE, 2, False),
        *((kind, SIZE, 2, False) for kind in ("fp8 channel", "int8", "w4 asym", "awq", "gptq")),
    ],
)
def test_packed_experts_give_the_logits_of_what_the_codes_mean(saved, kind, size, ranks, expert_parallel):
    """For 1, 5 and 64 tokens; of the checkpoint's tensors nothing is left beside the copy. Of two ranks each has 48 of
    96 inputs of down: the first ends within a block of 32, and the second begins there."""
    folder, expected = saved(kind, size)

    def run(tp: Any) -> list[torch.Tensor]:
        model, left = packed(folder, tp, expert_parallel)
        assert not left
        return [DenseRun(model, 64, 1, device=CPU).step({0: IDS[:n]}) for n in (1, 5, len(IDS))]

    for of_rank in on_all_ranks(ranks, run):
        for logits in of_rank:
            torch.testing.assert_close(logits, expected[: len(logits)], atol=tolerance(kind), rtol=0)


@pytest.mark.parametrize(("size", "expert_parallel"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_what_the_codes_mean(saved, kind, size, expert_parallel):
    folder, expected = saved(kind)

    def run(tp: Any) -> torch.Tensor:
        return DenseRun(loaded(folder, tp, expert_parallel), 64, 1, device=CPU).step({0: IDS})

    for logits in on_all_ranks(size, run):
        torch.testing.assert_close(logits, expected, atol=tolerance(kind), rtol=0)


@pytest.mark.parametrize("kind", ["fp8 block", "awq"])
def test_quantized_experts_are_moved_with_their_scales(saved, kind):
    """And what is derived from them; in another order, with replicas."""
    folder, expected = saved(kind)

    def run(tp: Any) -> torch.Tensor:
        model = loaded(folder, tp, True, redundant_experts=2)
        for slots in model.expert_slots:
            slots.move(ExpertPlacement((3, 2, 1, 1, 0, 3), 4, 2))
        return DenseRun(model, 64, 1, device=CPU).step({0: IDS})

    for logits in on_all_ranks(2, run):
        torch.testing.assert_close(logits, expected, atol=tolerance(kind), rtol=0)


def test_words_are_not_cut_but_whole_experts_have_none_to_cut(saved):
    spec = read_model_spec(find_model(saved("w4 asym")[0]), FAMILIES)
    assert "'model.layers.0.mlp.experts.0.gate_proj' is 12 outputs" in str(refused_shares(spec, 8))
    assert ".experts." not in str(refused_shares(spec, 8, expert_parallel=True))


def test_experts_that_are_not_quantized_alike_are_refused(saved, tmp_path):
    config = json.loads((saved("fp8 block")[0] / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["model.layers.1.mlp.experts.2"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(find_model(tmp_path, "dummy"), FAMILIES)
    with pytest.raises(ModelLoadError, match=r"experts\.0\.gate_proj' is quantized otherwise than '.*experts\.2\.gate"):
        on_all_ranks(1, lambda tp: build_model(spec, tp, torch.float32, 64))
