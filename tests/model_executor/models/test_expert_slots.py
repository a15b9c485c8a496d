"""Whole experts in slots of two ranks: replicas, placed anew between steps, counted, combined, and given new weights;
the logits stay those of transformers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from test_mixtures import CPU, IDS, checkpoint, loaded, logits_of, new_memory, random_model, step
from thread_tp import ThreadRank, on_all_ranks

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.distributed.parallel import TensorParallel
from ringcore.errors import ModelLoadError
from ringcore.families import FAMILIES
from ringcore.kernels.mixtures.dense_experts import DenseExperts
from ringcore.kernels.mixtures.expert_matrices import ExpertGate, ExpertMatrices, Routing
from ringcore.kernels.mixtures.placed_pairs import SlotTables, place_pairs_reference
from ringcore.model_executor.layers import expert_slots
from ringcore.model_executor.layers.expert_slots import ExpertSlots, SlotTensor
from ringcore.model_executor.layers.experts import BoundExperts
from ringcore.model_executor.loader import load_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.residual import NormedRows, Residual
from ringcore.model_executor.weight import Arrangement
from ringcore.model_executor.weight_update import WeightUpdate
from ringcore.protocol.expert_placement import ExpertPlacement

pytestmark = pytest.mark.sampled

# Of 4 experts in 6 slots of 2 ranks: what was elsewhere, in another order, and the replicas of others.
PLACED = ExpertPlacement((3, 2, 1, 1, 0, 3), 4, 2)
MODELS = {"native": "qwen3_moe", "transformers": "qwen3_moe", "biased, transposed, one tensor": "gpt_oss"}
ROUTINGS = ("as it is", "one expert", "none of a rank's", "all equally")


@pytest.fixture(scope="module", params=MODELS)
def saved(request, tmp_path_factory):
    """(the folder, transformers' model, how it is run)."""
    folder, hf = tmp_path_factory.mktemp("model"), random_model(MODELS[request.param])
    hf.save_pretrained(folder)
    return folder, hf, "native" if request.param == "native" else "transformers"


@pytest.fixture(params=[False, True], ids=["all-reduce", "combine"])
def combines(request, monkeypatch):
    monkeypatch.setattr(ThreadRank, "combines_all", request.param)


def assert_logits(model: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(step(model), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("combines")
def test_replicas_are_placed_anew_between_steps(saved):
    folder, hf, impl = saved
    expected = logits_of(hf)

    def run(tp: TensorParallel) -> None:
        model = loaded(folder, tp, True, impl, redundant_experts=2)
        assert_logits(model, expected)
        (slots,) = model.expert_slots
        initial, counts = slots.placement, slots.take_counts()
        assert sum(counts) == 2 * len(IDS)
        assert initial == ExpertPlacement.initial(4, 2, 2)
        assert slots.move(initial) == 0
        assert slots.move(PLACED) > 0
        assert_logits(model, expected)
        assert slots.take_counts() == counts, "counted by expert, wherever it is"
        slots.move(initial)
        assert_logits(model, expected)

    on_all_ranks(2, run)


def test_new_weights_for_experts_that_were_moved(saved):
    """Each slot takes those of the expert that is in it now; and none of them is left over or missing."""
    folder, hf, impl = saved
    expected = logits_of(hf)

    def run(tp: TensorParallel) -> None:
        spec = read_model_spec(find_model(folder), FAMILIES, impl)
        model = build_model(spec, tp, torch.float32, 64, expert_parallel=True, redundant_experts=2)
        tensors = load_weights(model.weights(), find_model(folder, "dummy"), 0, CPU, new_memory)
        model.bind(dict(tensors), updatable=True)
        model.expert_slots[0].move(PLACED)
        update = WeightUpdate(model.weights(), tensors, model.elsewhere)
        for name, tensor in checkpoint(folder).items():
            update.take(name, tensor)
        update.check_complete()
        model.refresh()
        assert_logits(model, expected)

    on_all_ranks(2, run)


@pytest.mark.usefixtures("combines")
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("redundant", [None, 0, 2, 4])
def test_forced_routings(routing, redundant):
    """By the layer itself: rows of a rank that has no expert of a token, replicas in turn, and every expert on each."""
    hf = random_model("qwen3_moe").model.layers[0].mlp
    x, k, num_experts = torch.randn(9, 32, generator=torch.Generator().manual_seed(0)), 2, 4
    experts = {
        "as it is": torch.rand(9, 4, generator=torch.Generator().manual_seed(1)).topk(2).indices,
        "one expert": torch.tensor([[0, 1]]).repeat(9, 1),
        "none of a rank's": torch.tensor([[3, 2]]).repeat(9, 1),
        "all equally": torch.stack([torch.arange(9) % 4, (torch.arange(9) + 1) % 4], 1),
    }[routing]
    weights = torch.rand(9, k, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        expected = hf.experts(x, experts, weights)
    up, down = hf.experts.gate_up_proj.detach(), hf.experts.down_proj.detach()

    def run(tp: TensorParallel) -> torch.Tensor:
        slots = ExpertSlots(num_experts, tp, redundant)
        own = list(slots.own)
        matrices = ExpertMatrices(DenseExperts(up[own]), DenseExperts(down[own]), first=slots.first)
        slots.bind(CPU, [], lambda: None)
        bound = BoundExperts(matrices, ExpertGate(), tp, slots=slots)
        stream, given = Residual(torch.ones(9, 32)), NormedRows(Residual(x))
        bound.add_to(stream, given, Routing(experts, weights))
        torch.testing.assert_close(stream.rows - 1, expected, atol=1e-5, rtol=1e-5)
        if redundant is not None:
            counted = Counter(experts.flatten().tolist())
            assert slots.take_counts() == [counted[expert] for expert in range(num_experts)]
        return bound(given, Routing(experts, weights))

    first, second = on_all_ranks(2, run)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(first, second)


class Reversed(Arrangement):
    """All bytes, over the bounds of slots."""

    def arrange(self, tensor: torch.Tensor) -> None:
        tensor.copy_(tensor.flip(0))

    restore = arrange


def test_what_is_arranged_for_kernels_is_moved_as_the_checkpoint_has_it(monkeypatch):
    """In pieces that are shorter than an expert."""
    monkeypatch.setattr(expert_slots, "_PIECE_BYTES", 20)

    def run(tp: TensorParallel) -> torch.Tensor:
        slots = ExpertSlots(4, tp, 2)
        tensor = torch.cat([torch.arange(10 * expert, 10 * expert + 5, dtype=torch.uint8) for expert in slots.own])
        Reversed().arrange(tensor)
        slots.bind(CPU, [SlotTensor(tensor, Reversed())], lambda: None)
        tp.all_reduce(tensor)  # all are bound
        monkeypatch.setattr(expert_slots.ops, "has_kernels", lambda device: True)
        slots.move(PLACED)
        return tensor.flip(0)

    found = torch.cat(on_all_ranks(2, run)).view(6, 5)
    assert found.tolist() == [list(range(10 * expert, 10 * expert + 5)) for expert in PLACED.experts]


def test_pairs_of_an_expert_take_its_replicas_in_turn():
    tables = SlotTables(torch.tensor([[0, 4], [3, 0]]).int(), torch.tensor([2, 1]).int(), torch.zeros(2).long())
    placed = place_pairs_reference(torch.tensor([[0, 1], [0, 1], [0, 0]]), tables, 2, True)
    assert placed.slots.tolist() == [[0, 3], [4, 3], [0, 0]]
    assert placed.ranks.tolist() == [0b011, 0b110, 0b001]
    assert tables.counts.tolist() == [4, 2]


def test_experts_and_redundant_ones_that_do_not_divide_are_refused(saved):
    folder, _, impl = saved
    if impl == "native":
        return  # refused by the configuration
    with pytest.raises(ModelLoadError, match="its 4 experts and 1 redundant ones do not divide over 2 ranks"):
        loaded(folder, ThreadRank(0, 2, None, []), True, impl, redundant_experts=1)
