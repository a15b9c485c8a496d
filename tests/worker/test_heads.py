"""EAGLE-3 heads: what they draft is what plain torch finds, in every step; tokens are those without drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from adjusted_model import Arithmetic
from adjusted_requests import EOS, PROCESSORS, VOCAB_SIZE, expected, some_requests
from device_runner import rows_on_device
from drafted_rows import MAX_TOKENS, write
from fake_graphs import head_graphs_on_cpu
from head_rows import Drafted, compare_drafts
from step_driver import admit, execute, make_config, make_step, run, start
from tiny_heads import HEAD_CONFIG, HeadReference, head_tensors, write_head

from ringcore.errors import ConfigError, ModelLoadError, RingcoreError
from ringcore.protocol.codec import int_array
from ringcore.worker.drafts import head_runs
from ringcore.worker.runner import draft_costs
from ringcore.worker.worker import Worker

LONG = [5, 17, 80, 3, 44, 9, 61, 2, 33, 70, 12, 90, 28, 7, 55] * 3
FREE = "scripted_drafts:FreeHead"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module", params=["cpu", "gpu", "graphs"])
def worker(request: pytest.FixtureRequest, tiny_llama: tuple[str, Any], folder: str) -> Iterator[Worker]:
    """gpu: its runner, by interpreted kernels; graphs: with the head's runs as graphs."""
    speculative = {"method": FREE, "model": folder, "num_drafts": 4}
    config = make_config(tiny_llama[0], logits_processors=PROCESSORS, speculative=speculative, max_num_seqs=14)
    patch = pytest.MonkeyPatch()
    patch.setattr(draft_costs, "COST_SIZES", (1, 2))
    if request.param != "cpu":
        rows_on_device(patch, plans_on_device=True)
    if request.param == "graphs":
        head_graphs_on_cpu(patch)
        patch.setattr(draft_costs, "COST_SIZES", (1, 2, 3, 17, 33))
    worker = start(Worker(config, 0, None), num_blocks=1 + 14 * MAX_TOKENS // 4)
    assert worker._runner is not None
    worker._runner.adjustments.grammars = Arithmetic(EOS, VOCAB_SIZE)  # type: ignore[assignment]
    patch.undo()
    yield worker
    worker.shutdown()


@pytest.fixture
def seen(worker: Worker, tiny_llama: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    return compare_drafts(worker, tiny_llama[1], monkeypatch)


def test_every_row_writes_what_it_would_alone(worker: Worker, tiny_llama: tuple[str, Any], seen: list[Drafted]) -> None:
    """Whatever it asks of its tokens; its drafts are wrong, mostly, and after each the head goes on as if it had never
    drafted them."""
    rng = random.Random(3)
    requests = some_requests(rng)
    due = [expected(tiny_llama[1], asked) for asked in requests]
    _, num_drafts = write(worker, requests, rng)
    for asked, tokens in zip(requests, due, strict=True):
        assert asked.written == tokens, asked.params
    assert num_drafts > len(requests)
    assert len({one.row for one in seen}) > len(requests) // 2


def test_prompts_in_chunks_prefixes_of_others_and_requests_that_were_preempted(
    worker: Worker, seen: list[Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of the head has at most 7 tokens."""
    monkeypatch.setattr(head_runs, "MOST_AT_ONCE", 7)
    blocks = [*range(1, 17)]
    run(worker, {0: 33}, new=[admit(0, LONG, blocks)])
    run(worker, {0: 5})
    run(worker, {0: 7})
    tokens = _decode(worker, 0, 6)
    # Its first 40 tokens are cached: 10 blocks.
    other = [*LONG[:43]]
    run(worker, {1: 3}, new=[admit(1, other, [*blocks[:10], *range(17, 23)], computed=40)])
    _decode(worker, 1, 6)
    # It is preempted and goes on in other blocks.
    known = [*LONG, *tokens]
    again = admit(2, known, [*range(23, 42)], num_prompt_tokens=len(LONG))
    run(worker, {2: 40}, finished=[0], new=[again])
    run(worker, {2: len(known) - 40})
    _decode(worker, 2, 6)
    assert {one.row for one in seen} == {0, 1, 2}
    assert len(seen) >= 6
    worker.reset_rows()


def _decode(worker: Worker, row: int, num_steps: int) -> list[int]:
    """-> what the row has then, after its prompt."""
    rows = worker._runner.rows  # type: ignore[union-attr]
    for _ in range(num_steps):
        execute(worker, msgspec.structs.replace(make_step({row: 1}), max_gained=int_array([5])))
    worker._runner.launcher.follow()  # type: ignore[union-attr]
    generated = rows.generated(row)
    return generated[generated >= 0].tolist()


def test_the_layout_of_speculators(
    tiny_llama: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an embedding of its own, other layers, and a residual stream that starts with normalised features."""
    tensors = head_tensors(seed=8)
    tensors["embed_tokens.weight"] = tiny_llama[1].model.embed_tokens.weight.detach().flip(0)
    stored = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    layer = {name: HEAD_CONFIG[name] for name in (*names, "vocab_size", "max_position_embeddings", "rope_theta")}
    taps = {"eagle_aux_hidden_state_layer_ids": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 2]}}
    head = write_head(tmp_path, stored, transformer_layer_config=layer, norm_before_residual=True, **taps)
    config = make_config(tiny_llama[0], speculative={"method": "eagle3", "model": Path(head)})
    assert config.scheduler.max_gain == 5
    monkeypatch.setattr(draft_costs, "COST_SIZES", (1, 2))
    worker = start(Worker(config, 0, None))
    proposer: Any = worker._runner._stages.proposer  # type: ignore[union-attr]
    run(worker, {0: 9}, new=[admit(0, LONG[:9], [*range(1, 8)])])
    with torch.inference_mode():
        proposer._compute()
        drafts = proposer._runs.draft(int_array([0]), np.array([9]), np.array([4]))
    known = proposer.rows.token_ids[0, :10].tolist()
    reference = HeadReference(tensors, tiny_llama[1], norm_before_residual=True, layers=[1, 1, 3])
    assert drafts.tolist() == [reference.drafts(known, 4)]
    worker.shutdown()


# ---------------------------------------------------------------------------------------------------------------------
# What is not served.

SHAPES = head_tensors()


def _without(name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in SHAPES.items() if other != name}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (_without("fc.weight"), {}, r"'fc.weight' is missing"),
        (_without("midlayer.hidden_norm.weight"), {}, r"midlayer.hidden_norm.weight' is missing"),
        (_without("d2t"), {}, r"'d2t' is missing: 60 draft tokens are some of the 97"),
        (SHAPES | {"fc.weight": torch.zeros(64, 64)}, {}, r"'fc.weight' has the shape \[64, 64\]"),
        (SHAPES | {"d2t": SHAPES["d2t"] + 50}, {}, r"maps draft token \d+ to \d+, outside the 97 tokens"),
        (SHAPES | {"d2t": SHAPES["d2t"].float()}, {}, r"'d2t' is F32 \[60\], and I64 \[60\]"),
        (SHAPES | {"fc.bias": torch.zeros(64)}, {}, r"'fc.bias' has no place"),
        (SHAPES, {"hidden_size": 32}, r"'hidden_size' is 32, and that of the LlamaForCausalLM is 64"),
        (SHAPES, {"target_hidden_size": 32}, r"'target_hidden_size' is 32"),
        (SHAPES, {"draft_vocab_size": 200}, r"'draft_vocab_size' is 200, above the model's 97"),
        (SHAPES, {"num_hidden_layers": 2}, r"'num_hidden_layers' is above 1"),
        (SHAPES, {"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, r"a list of 3 layers from 0 to 3"),
        (SHAPES, {"eagle_config": {"use_aux_hidden_state": False}}, r"'eagle_config.use_aux_hidden_state' is false"),
        (SHAPES, {"quantization_config": {"quant_method": "fp8"}}, r"a quantized head is not computed"),
        (SHAPES, {"num_key_value_heads": 3}, r"3 key/value heads do not divide 4"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    tiny_llama: tuple[str, Any], tmp_path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], message: str
) -> None:
    head = write_head(tmp_path, tensors, **config)
    with pytest.raises(ModelLoadError, match=message):
        make_config(tiny_llama[0], speculative={"method": "eagle3", "model": head})


@pytest.mark.parametrize(
    ("speculative", "options", "message"),
    [
        ({"method": "eagle3"}, {}, r"speculative.model=None: give the folder of a head"),
        ({"method": "eagle3", "model": "/nowhere"}, {}, r"speculative.model='/nowhere': give the folder"),
        ({"method": "suffix", "model": "."}, {}, r"speculative.model='.'.*give method 'eagle3' too"),
        ({"method": "eagle3", "model": ".", "min_match": 2}, {}, r"min_match=2: it is of the method 'suffix'"),
        ({"method": "eagle3", "model": ".", "num_drafts": 17}, {}, r"num_drafts=17: give an integer from 1 to 16"),
        ({"method": "eagle3", "model": "HEAD"}, {"pipeline_parallel_size": 2}, r"give pipeline_parallel_size=1"),
    ],
)
def test_what_cannot_be_served_is_refused(
    tiny_llama: tuple[str, Any], folder: str, speculative: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    given = speculative | ({"model": folder} if speculative.get("model") == "HEAD" else {})
    with pytest.raises(ConfigError, match=message):
        make_config(tiny_llama[0], speculative=given, **options)


def test_a_head_that_cannot_be_split_is_refused(tiny_llama: tuple[str, Any], tmp_path: Path) -> None:
    cut = {name: tensor[:78] for name, tensor in SHAPES.items() if "gate" in name or "up_" in name}
    cut["midlayer.mlp.down_proj.weight"] = SHAPES["midlayer.mlp.down_proj.weight"][:, :78].contiguous()
    head = write_head(tmp_path, SHAPES | cut, intermediate_size=78)
    with pytest.raises(ConfigError, match=r"speculative=.*of the head: tensor_parallel_size=4: .*size of 78"):
        make_config(tiny_llama[0], speculative={"method": "eagle3", "model": head}, tensor_parallel_size=4)


def test_a_head_of_another_proposer_needs_its_folder(tiny_llama: tuple[str, Any]) -> None:
    with pytest.raises(RingcoreError, match=r"drafts by a head, whose folder is missing"):
        start(Worker(make_config(tiny_llama[0], speculative={"method": FREE}), 0, None))
