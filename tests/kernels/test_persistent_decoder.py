"""Which models run the persistent kernel, and in which steps; a model of a checkpoint by it, beside transformers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import cuda_on_cpu
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "model_executor"))

from persistent_runs import use_programs
from quantized_checkpoints import quantize_folder, rounded_inputs
from thread_tp import on_all_ranks
from tiny_checkpoints import hf_logits, hf_model, load

from ringcore.attention.backend import AttentionBackend, SingleTokens
from ringcore.attention.context import NO_TOKEN_CONTEXT, ForwardContext, GroupContext, TokenContext
from ringcore.distributed.parallel import SingleRank
from ringcore.host.measurements import Measurements
from ringcore.kernels.linears.found_tiles import FoundTiles
from ringcore.kernels.persistent import persistent_layers as kernel_module
from ringcore.kernels.persistent import persistent_rows_tiles, persistent_tiles
from ringcore.kernels.persistent.persistent_rows import PersistentRows
from ringcore.model_executor import ops
from ringcore.model_executor.layers.expert_slots import ExpertSlots
from ringcore.model_executor.layers.rotary import KernelRotation
from ringcore.model_executor.linear_schemes.searched_scheme import SearchedProduct, SearchedTiles, searched
from ringcore.model_executor.models.decoder_layer import DecoderLayer, LayerInputs
from ringcore.model_executor.models.persistent_decoder import PersistentDecoder
from ringcore.model_executor.models.transformers.fusion import fused_layer
from ringcore.model_executor.models.transformers.fusion.forward_pass import ForwardPass
from ringcore.model_executor.models.transformers.fusion.fused_layer import FusedLayer
from ringcore.model_executor.residual import Residual

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
}
BLOCK_SIZE, BLOCK = 16, (128, 128)  # of the KV cache, and of weights in FP8


@pytest.fixture(autouse=True)
def _a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are on a CPU, and layers take what they would on a Hopper GPU."""
    monkeypatch.setattr(ops, "has_kernels", lambda device: True)
    monkeypatch.setattr(kernel_module, "runs_on", lambda device: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def make(
    folder: Path,
    family: str = "Qwen3",
    dtype: torch.dtype = torch.bfloat16,
    block: tuple[int, int] | None = None,
    kept: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """block: of FP8, but for the linears of `kept`."""
    hf_model(family, **SIZES | options).to(dtype).save_pretrained(folder)
    if block is not None:
        quantize_folder(folder, block, kept)
    return load(folder, dtype=dtype)


def decoder_of(model: Any) -> PersistentDecoder | None:
    found: PersistentDecoder | None = model._persistent
    return found


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("Qwen3", torch.bfloat16, {}),
        ("Llama", torch.float16, {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}),
        ("Qwen2", torch.bfloat16, {}),  # biases
        ("Qwen3Moe", torch.bfloat16, {"mlp_only_layers": []}),
        ("Qwen3Moe", torch.float16, {"mlp_only_layers": [], "norm_topk_prob": False}),
        ("Qwen3", torch.bfloat16, {"block": BLOCK}),
        ("Qwen2", torch.float16, {"block": BLOCK}),
        ("Qwen3Moe", torch.bfloat16, {"block": BLOCK, "mlp_only_layers": [], "moe_intermediate_size": 128}),
    ],
)
def test_models_that_run_it(tmp_path: Path, family: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert decoder_of(make(tmp_path, family, dtype, **options)) is not None


@pytest.mark.parametrize(
    ("family", "dtype", "options"),
    [
        ("Qwen3", torch.float32, {}),
        ("Gemma3", torch.bfloat16, {}),  # norms after sublayers, windows
        ("Mistral", torch.bfloat16, {}),  # windows
        ("Qwen3Moe", torch.bfloat16, {"mlp_only_layers": [0]}),  # layers that differ
        ("Qwen3Moe", torch.bfloat16, {"mlp_only_layers": [], "moe_intermediate_size": 36}),  # not of 16 bytes
        ("Llama", torch.bfloat16, {"hidden_size": 768}),
        ("Llama", torch.bfloat16, {"mlp_bias": True, "attention_bias": True}),
        ("Qwen3", torch.float32, {"block": BLOCK}),
        ("Qwen3", torch.bfloat16, {"block": (64, 128)}),
        ("Qwen3", torch.bfloat16, {"block": BLOCK, "kept": [f"model.layers.{i}.self_attn.o_proj" for i in range(2)]}),
        ("Qwen3", torch.bfloat16, {"block": BLOCK, "kept": ["model.layers.1.mlp.down_proj"]}),
        ("Qwen3Moe", torch.bfloat16, {"block": BLOCK, "mlp_only_layers": [], "moe_intermediate_size": 64}),
    ],
)
def test_models_that_do_not(tmp_path: Path, family: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert decoder_of(make(tmp_path, family, dtype, **options)) is None


def test_not_on_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "runs_on", lambda device: False)
    assert decoder_of(make(tmp_path)) is None


def test_not_over_ranks(tmp_path: Path) -> None:
    """Sums over ranks are between the layers."""
    make(tmp_path, num_key_value_heads=2)
    models = on_all_ranks(2, lambda tp: load(tmp_path, tp, torch.bfloat16))
    assert [decoder_of(model) for model in models] == [None, None]


@pytest.mark.parametrize("block", [None, BLOCK])
def test_where_tiles_of_other_steps_are_searched(tmp_path: Path, block: tuple[int, int] | None) -> None:
    """Its own has none: a recorded step of one row asks for none."""
    model = make(tmp_path, block=block)
    tiles = SearchedTiles(FoundTiles(Measurements(tmp_path), {"device": "a card"}))
    for layer in model.layers:
        attention, mlp = layer.self_attention, layer.mlp
        for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
            linear._product = searched(linear.product, tiles, num_bytes=0)
            assert isinstance(linear.product, SearchedProduct)
    assert PersistentDecoder.of(model.layers) is not None


@pytest.mark.parametrize("block", [None, BLOCK])
def test_not_where_results_are_batch_invariant(tmp_path: Path, block: tuple[int, int] | None) -> None:
    model = make(tmp_path, block=block)
    linear = model.layers[1].mlp.down_proj
    linear._product = linear.product.batch_invariant()
    assert PersistentDecoder.of(model.layers) is None


def test_not_of_experts_over_ranks(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3Moe", mlp_only_layers=[], num_key_value_heads=2)
    models = on_all_ranks(2, lambda tp: load(tmp_path, tp, torch.bfloat16))
    assert [layer.mlp.experts.dense for model in models for layer in model.layers] == [None] * 4


def test_not_of_experts_that_move(tmp_path: Path) -> None:
    model = make(tmp_path, "Qwen3Moe", mlp_only_layers=[])
    experts = model.layers[1].mlp.experts
    experts.slots = ExpertSlots(8, SingleRank(), None)
    assert PersistentDecoder.of(model.layers) is None


@pytest.mark.parametrize("of", ["router", "experts"])
def test_not_of_mixtures_that_are_batch_invariant(tmp_path: Path, of: str) -> None:
    model = make(tmp_path, "Qwen3Moe", mlp_only_layers=[])
    getattr(model.layers[1].mlp, of)._arithmetic = SimpleNamespace(is_batch_invariant=True)
    assert PersistentDecoder.of(model.layers) is None


def test_not_of_layers_that_differ(tmp_path: Path) -> None:
    model = make(tmp_path)
    attention = model.layers[1].self_attention
    attention.attention = replace(attention.attention, scale=0.5)
    assert PersistentDecoder.of(model.layers) is None


class Alone(AttentionBackend):
    """Its plan is the row."""

    def __init__(self) -> None:
        pass

    @classmethod
    def refusal(cls, *_: object) -> str | None:
        return None

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        raise AssertionError

    def plan(self, metadata: object) -> object:
        raise AssertionError

    def forward(self, *_: object, **__: object) -> torch.Tensor:
        raise AssertionError

    def single_tokens(self, plan: Any) -> SingleTokens | None:
        found: SingleTokens | None = plan
        return found


def context(row: SingleTokens | None, kv_caches: Sequence[torch.Tensor], tokens: TokenContext) -> ForwardContext:
    nothing: Any = None
    caches = dict(enumerate(kv_caches))
    return ForwardContext((GroupContext(nothing, Alone(), row),), dict.fromkeys(caches, 0), caches, tokens)


def kv_caches(dtype: torch.dtype = torch.bfloat16, num_blocks: int = 4) -> list[torch.Tensor]:
    return [torch.zeros(num_blocks, 2, 1, BLOCK_SIZE, 128, dtype=dtype) for _ in range(2)]


@pytest.mark.parametrize(
    ("num_rows", "num_seqs", "tokens", "dtype", "kernel"),
    [
        (1, 1, NO_TOKEN_CONTEXT, torch.bfloat16, "PersistentLayers"),
        (2, 2, NO_TOKEN_CONTEXT, torch.bfloat16, "PersistentRows"),
        (8, 8, NO_TOKEN_CONTEXT, torch.bfloat16, "PersistentRows"),
        (9, 9, NO_TOKEN_CONTEXT, torch.bfloat16, None),
        (1, None, NO_TOKEN_CONTEXT, torch.bfloat16, None),  # a chunk of a prompt, or drafts
        (4, 2, NO_TOKEN_CONTEXT, torch.bfloat16, None),
        (1, 1, TokenContext(torch.zeros(1, dtype=torch.int64)), torch.bfloat16, None),  # an adapter
        (2, 2, TokenContext(torch.zeros(2, dtype=torch.int64)), torch.bfloat16, None),
        (1, 1, NO_TOKEN_CONTEXT, torch.uint8, None),  # an FP8 cache
        (2, 2, NO_TOKEN_CONTEXT, torch.uint8, None),
    ],
)
def test_steps(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    num_seqs: int | None,
    tokens: TokenContext,
    dtype: torch.dtype,
    kernel: str | None,
) -> None:
    decoder = decoder_of(make(tmp_path))
    assert decoder is not None
    calls: list[str] = []
    for each in (kernel_module.PersistentLayers, PersistentRows):
        monkeypatch.setattr(each, "__call__", lambda self, *given: calls.append(type(self).__name__))
    rows = None
    if num_seqs is not None:
        rows = SingleTokens(torch.ones(num_seqs, dtype=torch.int32), torch.ones(num_seqs, 2, dtype=torch.int32))
    hidden, rotations = torch.zeros(num_rows, 512), [KernelRotation(torch.zeros(num_rows, 128))]
    ctx = context(rows, kv_caches(dtype), tokens)
    assert decoder(Residual(hidden), LayerInputs(ctx, rotations)) == (kernel is not None)
    assert calls == ([] if kernel is None else [kernel])


@pytest.mark.parametrize(
    ("family", "options"), [("Qwen3", {"block": BLOCK}), ("Qwen3Moe", {"mlp_only_layers": []})], ids=["FP8", "mixture"]
)
def test_models_that_run_it_for_one_row_alone(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    decoder = decoder_of(make(tmp_path, family, **options))
    assert decoder is not None
    assert decoder.of_one_row is not None
    assert decoder.of_rows is None


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "block", "num_rows", "tolerance"),
    [
        ("Qwen3", None, 1, 0.02),
        ("Qwen2", None, 1, 0.02),
        ("Qwen2", None, 3, 0.02),
        ("Qwen3Moe", None, 1, 0.02),
        ("Qwen3", BLOCK, 1, 0.15),  # inputs that differ by 3e-4 are rounded to other codes, and logits by 10%
    ],
)
def test_tokens_of_a_checkpoint_are_those_of_transformers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    block: tuple[int, int] | None,
    num_rows: int,
    tolerance: float,
) -> None:
    """One after the other, on a CPU; logits beside those in float32 of the same weights. Rows begin one after another,
    and write the same."""
    use_programs(monkeypatch, 3 if num_rows == 1 else 9)
    options = {"mlp_only_layers": []} if family == "Qwen3Moe" else {}
    theirs = hf_model(family, **SIZES | options).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    ids = [5, 9, 77, 9]
    if block is not None:
        ids = ids[:2]
        mean_in_blocks(theirs, quantize_folder(tmp_path, block), block)
    model = load(tmp_path, dtype=torch.bfloat16)
    decoder = decoder_of(model)
    assert decoder is not None
    expected, caches = hf_logits(theirs.float(), ids), kv_caches(num_blocks=2 * num_rows + 2)
    frequencies = 5000.0 ** -(torch.arange(0, 128, 2) / 128)
    table = torch.arange(2, 2 * num_rows + 2, dtype=torch.int32).view(num_rows, 2)
    found = torch.zeros(num_rows, *expected.shape)
    for step in range(len(ids) + num_rows - 1):
        positions = step - torch.arange(num_rows)
        positions = torch.where(positions < len(ids), positions, -1)
        angles = positions[:, None] * frequencies
        cos_sin = torch.stack((angles.cos(), angles.sin()), -1).view(num_rows, -1)
        rows = SingleTokens((positions + 1).clamp(min=0).int(), table)
        tokens = torch.tensor(ids)[positions.clamp(min=0)]
        hidden = theirs.get_input_embeddings().weight[tokens].detach().clone()
        ctx = context(rows, caches, NO_TOKEN_CONTEXT)
        assert decoder(Residual(hidden), LayerInputs(ctx, [KernelRotation(cos_sin)]))
        logits = theirs.lm_head(theirs.model.norm(hidden)).detach()
        for row, position in enumerate(positions.tolist()):
            if position >= 0:
                found[row, position] = logits[row]
    persistent_tiles.choose_persistent_tiles.cache_clear()
    persistent_rows_tiles.choose_rows_tiles.cache_clear()
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


def mean_in_blocks(model: Any, expanded: dict[str, torch.Tensor], block: tuple[int, int]) -> None:
    """A model of transformers has the weights that codes mean, and rounds what they are multiplied by."""
    model.float().load_state_dict(expanded, strict=False)
    for name in expanded:
        linear = model.get_submodule(name.removesuffix(".weight"))
        linear.register_forward_pre_hook(lambda _, given: (rounded_inputs("fp8 block", given[0], None, block),))


def computed_by(monkeypatch: pytest.MonkeyPatch, *continues: bool) -> list[str]:
    """What the layers of a body compute, all at once or one by one. continues: of each, the stream of the last one."""
    computed: list[str] = []
    decoder = SimpleNamespace(of=lambda layers: lambda *_: computed.append(f"{len(layers)} layers") is None)
    monkeypatch.setattr(fused_layer, "PersistentDecoder", decoder)
    layers = [
        FusedLayer(
            cast(DecoderLayer, lambda *_, i=i: computed.append(f"layer {i}")),
            torch.nn.Identity(),
            scale=1.0,
            continues=one,
            is_continued=continues[i + 1] if i + 1 < len(continues) else False,
            final_norm=None,
            num_results=None,
        )
        for i, one in enumerate(continues)
    ]
    layers[0].begin_with(layers[1:])
    hidden, given = torch.zeros(1, 1, 8), ForwardPass(context(None, [], NO_TOKEN_CONTEXT), {}, [])
    for layer in layers:
        hidden = layer(hidden, ringcore=given)
    return computed


@pytest.mark.parametrize("num_layers", [1, 3])
def test_modules_of_transformers_in_one_stream(monkeypatch: pytest.MonkeyPatch, num_layers: int) -> None:
    """The first computes all: of one layer too, of which kernel warm-up makes its model."""
    assert computed_by(monkeypatch, False, *[True] * (num_layers - 1)) == [f"{num_layers} layers"]


def test_modules_of_transformers_in_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    assert computed_by(monkeypatch, False, True, False) == ["layer 0", "layer 1", "layer 2"]
