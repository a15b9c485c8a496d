"""Mixtures of a GGUF file whose experts and linears stay in its blocks: the logits of the expanded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import write_gguf
from thread_tp import on_all_ranks
from written_gguf import CPU, EXPERTS, HIDDEN, assert_equal, built, hf, loaded, step, written

from ringcore.checkpoint import find_model
from ringcore.checkpoint.expected_tensors import stored_bytes
from ringcore.checkpoint.quantization import GGUF_BLOCKS
from ringcore.config import EngineConfig
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.errors import CapacityError, InvalidRequestError
from ringcore.front_end.start_checks import check_host_memory
from ringcore.host.resources import Host
from ringcore.model_executor.linear_schemes.block_kernels import block_kernels
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.tensor_source import open_source
from ringcore.model_executor.weight_update import WeightUpdate
from ringcore.protocol.expert_placement import ExpertPlacement

MIXTURES = "qwen3moe", "qwen2moe", "minimax-m2"


def of_experts(model: Any) -> dict[str, Any]:
    return {weight.name: weight for weight in model.weights() if ".experts." in weight.name}


@pytest.mark.parametrize("kind", sorted(GGUF_BLOCKS))
def test_every_type_on_one_rank_and_two(tmp_path, kind):
    """Of two ranks each has 128 inputs of down: half of a block of the K types, and the other rank has the rest."""
    path = written(tmp_path, "qwen3moe", kind)
    expected = step(loaded(path, "expanded"))
    for size in (1, 2):
        for found in on_all_ranks(size, lambda tp: step(loaded(path, "packed", tp))):
            assert_equal(found, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K"])
@pytest.mark.parametrize("architecture", ["qwen2moe", "minimax-m2"])
def test_two_ranks_have_shares_of_linears_too(tmp_path, architecture, kind):
    """Of attention and of shared experts: of minimax-m2's 128 inputs of o_proj each rank has the one block of 256."""
    path = written(tmp_path, architecture, kind)
    expected = step(loaded(path, "expanded"))

    def run(tp: TensorParallel) -> tuple[torch.Tensor, set[torch.dtype]]:
        model = loaded(path, "packed", tp)
        return step(model), {weight.dtype for weight in model.weights() if "o_proj" in weight.name}

    for found, dtypes in on_all_ranks(2, run):
        assert_equal(found, expected)
        assert dtypes == {torch.uint8}


@pytest.mark.parametrize("architecture", MIXTURES)
def test_what_is_in_memory_is_what_is_in_the_file(tmp_path, architecture):
    """Gate and up in another type than down, as files of mixed types have them."""
    path = written(tmp_path, architecture, "Q4_K", down="Q6_K")
    model = loaded(path, "packed")
    assert_equal(step(model), step(loaded(path, "expanded")))
    rows = of_experts(model)
    assert {name.rpartition("_")[2] for name in rows} == {"rows"}
    size = 2 * EXPERTS * HIDDEN * 256
    assert sum(weight.nbytes for weight in rows.values()) == size * 2 * 144 // 256 + size * 210 // 256
    held = sum(weight.nbytes for weight in model.weights())
    assert held <= stored_bytes(find_model(path), 4) < path.stat().st_size
    assert all(layer.mlp.experts.gate_up_proj.is_meta for layer in model._model.model.layers), "nothing is expanded"
    assert not [reason for reason in model.report().not_fused if "expanded" in reason]


def test_the_host_s_memory_is_compared_with_what_is_packed(tmp_path):
    path = written(tmp_path, "qwen3moe", "Q8_0")
    config = EngineConfig.from_options(model=str(path), gguf_weights="packed", device="cpu", dtype="float32")
    needed = stored_bytes(find_model(path), 4)
    check_host_memory(config, SmallHost(needed))
    with pytest.raises(CapacityError, match="1 bytes missing"):
        check_host_memory(config, SmallHost(needed - 1))


class SmallHost(Host):
    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self._free_bytes = free_bytes

    def free_memory_bytes(self) -> int:
        return self._free_bytes


def test_whole_experts_of_two_ranks_and_moved_between_them(tmp_path):
    path = written(tmp_path, "qwen3moe", "Q5_K")
    expected = step(loaded(path, "expanded"))

    def run(tp: TensorParallel) -> torch.Tensor:
        model = loaded(path, "packed", tp, expert_parallel=True, redundant_experts=2)
        for slots in model.expert_slots:
            slots.move(ExpertPlacement((3, 2, 1, 1, 0, 3), 4, 2))
        return step(model)

    for found in on_all_ranks(2, run):
        assert_equal(found, expected)


def test_inputs_rounded_to_8_bits_and_without_a_compiler(tmp_path, monkeypatch):
    path = written(tmp_path, "qwen3moe", "Q4_0")
    exact, rounded = step(loaded(path, "packed")), step(loaded(path, "packed_int8"))
    monkeypatch.setenv("PATH", "/nowhere")
    block_kernels.cache_clear()
    try:
        assert_equal(step(loaded(path, "packed")), exact)
        for found in on_all_ranks(2, lambda tp: step(loaded(path, "packed_int8", tp))):
            assert (found - rounded).abs().mean() < (found - exact).abs().mean()
    finally:
        block_kernels.cache_clear()


@pytest.mark.parametrize("split", [{}, {"expert_parallel": True, "redundant_experts": 2}])
def test_gate_and_up_of_two_types_stay_each_in_its_own(tmp_path, split):
    """A share of each expert, which is a part of gate and of up, or whole experts, moved between the ranks too."""
    kinds = {"ffn_up_exps": "Q6_K", "ffn_down_exps": "Q8_0", "ffn_gate_inp": "F32"}
    path = Path(write_gguf(tmp_path, "minimax-m2", hf("minimax-m2"), "Q4_K", kinds))
    expected, size = step(loaded(path, "expanded")), 2 * EXPERTS * HIDDEN * 256

    def run(tp: TensorParallel) -> tuple[torch.Tensor, int]:
        model = loaded(path, "packed", tp, **split if tp.size > 1 else {})
        for slots in model.expert_slots:
            slots.move(ExpertPlacement((3, 2, 1, 1, 0, 3), 4, 2))
        assert not [reason for reason in model.report().not_fused if "expanded" in reason]
        return step(model), sum(weight.nbytes for weight in of_experts(model).values())

    per_expert = size * 144 // 256 + size * 210 // 256 + size * 34 // 32
    for num_ranks in (1, 2):
        for found, num_bytes in on_all_ranks(num_ranks, run):
            assert_equal(found, expected)
            own = 3 if num_ranks == 2 and split else EXPERTS / num_ranks
            assert num_bytes == per_expert * own / EXPERTS


def test_fused_linears_of_two_types_stay_each_in_its_own(tmp_path):
    kinds = {"attn_v": "Q6_K", "ffn_up": "Q8_0"}
    path = Path(write_gguf(tmp_path, "llama", hf("llama"), "Q4_0", kinds))
    expected = step(loaded(path, "expanded"))
    for size in (1, 2):
        for found in on_all_ranks(size, lambda tp: step(loaded(path, "packed", tp))):
            assert_equal(found, expected)
    model = loaded(path, "packed")
    assert model.report().fused["layers"] == 2
    assert sum(weight.nbytes for weight in model.weights()) == stored_bytes(find_model(path), 4)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [
        ({"ffn_up_exps": "F16"}, "gate and up are Q4_0 and numbers"),
        ({"ffn_down_exps": "F16"}, "their type has no kernels here"),
    ],
)
def test_what_is_expanded_is_said(tmp_path, kinds, reason):
    path = Path(write_gguf(tmp_path, "qwen3moe", hf("qwen3moe"), "Q4_0", kinds))
    model = loaded(path, "packed")
    assert_equal(step(model), step(loaded(path, "expanded")))
    assert f"2 matrices of experts are expanded: {reason}" in model.report().not_fused


class Ranks(SingleRank):
    size = 8


def test_a_share_of_fewer_outputs_than_the_kernels_take_is_expanded(tmp_path):
    changes = {"moe_intermediate_size": 32, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    model = built(written(tmp_path, "qwen3moe", "Q4_0", **changes), "packed", Ranks())
    reason = "2 matrices of experts are expanded: a rank has 8 outputs of each, no multiple of 16"
    assert reason in model.report().not_fused
    types = {name.rpartition(".")[2]: weight.dtype for name, weight in of_experts(model).items()}
    assert types == {"gate_up_proj": torch.float32, "down_proj_rows": torch.uint8}


def test_updates_are_of_files_of_the_same_types(tmp_path):
    """In place, as sleep mode reads them again; numbers are refused before one is written."""
    path, new = written(tmp_path / "a", "qwen3moe", "Q8_0"), written(tmp_path / "b", "qwen3moe", "Q8_0", seed=2)
    expected, name = step(loaded(new, "expanded")), "model.layers.0.mlp.experts.1.up_proj.weight"

    def run(tp: TensorParallel) -> torch.Tensor:
        model = built(path, "packed", tp)
        tensors = load_weights(model.weights(), find_model(path), 0, CPU, new_memory)
        model.bind(dict(tensors), updatable=True)
        update = WeightUpdate(model.weights(), tensors, model.elsewhere)
        with pytest.raises(InvalidRequestError, match="is held as Q8_0 of a GGUF file, and comes as numbers"):
            update.take(name, torch.zeros(256, HIDDEN))
        wanted = [part.checkpoint_name for weight in model.weights() for part in weight.parts]
        with open_source(find_model(new), 0, wanted) as source:
            update.read(source)
        update.check_complete()
        update.finish()
        model.refresh()
        return step(model)

    for size in (1, 2):
        for found in on_all_ranks(size, run):
            assert_equal(found, expected)


def new_memory(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)
