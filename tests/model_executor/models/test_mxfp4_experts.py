"""gpt-oss with MXFP4 experts: the logits of the expanded model, what each rank has of them, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from dense_attention import DenseRun
from mxfp4_checkpoints import CONFIG, NUMBERS, save_mxfp4
from safetensors.torch import load_file, save_file
from thread_tp import on_all_ranks

from ringcore.checkpoint import TensorIndex, find_model, read_model_spec
from ringcore.checkpoint.quantization import Mxfp4Format
from ringcore.checkpoint.quantization.contents import check_contents
from ringcore.distributed.parallel import SingleRank, TensorParallel
from ringcore.errors import InvalidRequestError, ModelLoadError
from ringcore.families import FAMILIES
from ringcore.model_executor.expert_schemes.interleaved_blocks import is_interleaved
from ringcore.model_executor.expert_schemes.kernel_experts import KernelExperts
from ringcore.model_executor.expert_schemes.mxfp4_scheme import Mxfp4Scheme
from ringcore.model_executor.expert_schemes.quantized_experts import QuantizedExperts
from ringcore.model_executor.linear_schemes.codes import E2m1Codes
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.loader import load_weights, pending_weights
from ringcore.model_executor.models import build_model
from ringcore.model_executor.models.transformers.folder_check import check_folder
from ringcore.model_executor.weight_update import WeightUpdate
from ringcore.protocol.expert_placement import ExpertPlacement
from ringcore.protocol.folder_check import FolderCheckStart

CPU = torch.device("cpu")
IDS = [6, 5, 4, 90, 12, 13, 60, 33, 2, 17, 54, 54, 8]
BLOCKS, SCALES = "model.layers.0.mlp.experts.down_proj_blocks", "model.layers.0.mlp.experts.down_proj_scales"


def random_model() -> Any:
    from transformers import AutoModelForCausalLM, GptOssConfig

    torch.manual_seed(1)
    config = GptOssConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"], sliding_window=8, pad_token_id=0, eos_token_id=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss")
    return folder, save_mxfp4(folder, random_model())


def read(folder):
    files = find_model(folder)
    return files, read_model_spec(files, FAMILIES)


def loaded(folder, tp: TensorParallel | None = None, expert_parallel: bool = False, **options: Any) -> Any:
    files, spec = read(folder)
    model = build_model(spec, tp or SingleRank(), torch.float32, 64, expert_parallel=expert_parallel, **options)
    with pending_weights(model.weights(), files, 0, CPU, may_ignore=model.may_ignore) as tensors:
        model.bind(tensors, updatable=True)
    return model


def step(model) -> torch.Tensor:
    return DenseRun(model, 64, 1, device=CPU).step({0: IDS})


def logits_of(hf) -> torch.Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([IDS]), use_cache=False).logits[0]


def expert_bytes(model) -> int:
    return sum(weight.nbytes for weight in model.weights() if weight.name.endswith(("_blocks", "_scales")))


def test_they_are_packed_as_transformers_reads_them(saved):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, hf = saved
    tensors = load_file(folder / "model.safetensors")
    expanded = convert_moe_packed_tensors(tensors[BLOCKS], tensors[SCALES], dtype=torch.float32)
    assert torch.equal(expanded, hf.model.layers[0].mlp.experts.down_proj)


def test_logits_are_those_of_the_expanded_model_in_4_25_bits(saved):
    folder, hf = saved
    files, spec = read(folder)
    check_folder(FolderCheckStart(spec, files))
    model = loaded(folder)
    torch.testing.assert_close(step(model), logits_of(hf), atol=1e-4, rtol=1e-4)
    assert model.report().fused["experts"] == 2
    assert expert_bytes(model) == 2 * 4 * 3 * 32 * 64 * 4.25 / 8
    for layer in model._model.model.layers:
        kind = KernelExperts if is_interleaved(torch.empty(1, 16)) else QuantizedExperts
        assert isinstance(layer.mlp.experts.ringcore.matrices.up, kind)
        assert layer.mlp.experts.gate_up_proj.is_meta, "nothing is expanded"


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_two_ranks_have_half_of_the_blocks_and_scales(saved, expert_parallel):
    folder, hf = saved

    def run(tp: TensorParallel) -> tuple[int, torch.Tensor]:
        model = loaded(folder, tp, expert_parallel)
        return expert_bytes(model), step(model)

    for nbytes, logits in on_all_ranks(2, run):
        torch.testing.assert_close(logits, logits_of(hf), atol=1e-4, rtol=1e-4)
        assert nbytes == 4 * 3 * 32 * 64 * 4.25 / 8


def test_blocks_and_scales_are_moved_between_ranks(saved):
    folder, hf = saved

    def run(tp: TensorParallel) -> torch.Tensor:
        model = loaded(folder, tp, True, redundant_experts=2)
        for slots in model.expert_slots:
            slots.move(ExpertPlacement((3, 2, 1, 1, 0, 3), 4, 2))
        return step(model)

    for logits in on_all_ranks(2, run):
        torch.testing.assert_close(logits, logits_of(hf), atol=1e-4, rtol=1e-4)


class Ranks(SingleRank):
    size = 4


def test_a_share_is_of_whole_groups(saved):
    folder, _ = saved
    with pytest.raises(
        ModelLoadError, match=r"down_proj_blocks' is 16 inputs from 0 on, .* of 32 each; give expert_parallel=True"
    ):
        loaded(folder, Ranks())


def test_new_blocks_and_scales_of_a_checkpoint_and_no_dense_ones(saved):
    """In place. Also dummy weights, which every rank makes of its own slices."""
    folder, hf = saved

    def run(tp: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        model = build_model(read(folder)[1], tp, torch.float32, 64)
        tensors = load_weights(model.weights(), find_model(folder, "dummy"), 0, CPU, new_memory)
        model.bind(dict(tensors), updatable=True)
        dummy = step(model)
        update = WeightUpdate(model.weights(), tensors, model.elsewhere)
        with pytest.raises(InvalidRequestError, match=r"'model.layers.0.mlp.experts.down_proj' has no place"):
            update.take(BLOCKS.removesuffix("_blocks"), torch.zeros(4, 64, 32))
        for name, tensor in load_file(folder / "model.safetensors").items():
            update.take(name, tensor)
        update.check_complete()
        update.finish()
        model.refresh()
        return dummy, step(model)

    (whole, updated), *_ = on_all_ranks(1, run)
    torch.testing.assert_close(updated, logits_of(hf), atol=1e-4, rtol=1e-4)
    assert whole.isfinite().all()
    assert whole.std() > 0.1
    for dummy, updated in on_all_ranks(2, run):
        torch.testing.assert_close(updated, logits_of(hf), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(dummy, whole, atol=1e-4, rtol=1e-4)


def new_memory(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def filled(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[5] = 255
    return tensor


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (SCALES, lambda _: None, f"tensor '{SCALES}' is missing"),
        (BLOCKS, lambda blocks: blocks[..., :8], r"has the shape \[4, 32, 2, 8\], .* asks for \[4, 32, 2, 16\]"),
        (BLOCKS, lambda blocks: blocks.int(), f"tensor '{BLOCKS}' is I32, mxfp4 has it in U8"),
        (SCALES, filled, f"tensor '{SCALES}' has the scale 255, which is no number; download it again"),
    ],
)
def test_a_broken_tensor_is_named_before_a_worker_starts(saved, tmp_path, name, change, match):
    folder, _ = saved
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed.contiguous()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    files, spec = read(tmp_path)
    with pytest.raises(ModelLoadError, match=match):
        check(files, spec)


def check(files, spec) -> None:
    """As a front end does."""
    check_contents(TensorIndex(files.weight_files), spec.quantization)
    check_folder(FolderCheckStart(spec, files))


def test_sizes_and_models_that_have_no_such_experts_are_refused(saved, tmp_path):
    config = json.loads((saved[0] / "config.json").read_text())
    llama = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "intermediate_size": 48}
    for changed, match in (
        ({"intermediate_size": 48}, r"is 48 inputs from 0 on, and its scales are of 32 each"),
        (llama, "its experts are quantized, and it has none of transformers' interface"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed))
        spec = read_model_spec(find_model(tmp_path, "dummy"), FAMILIES)
        with pytest.raises(ModelLoadError, match=match):
            build_model(spec, SingleRank(), torch.float32, 64)


def test_every_code_and_scale_means_what_the_format_says():
    from ringcore.checkpoint.quantization import Mxfp4Format
    from ringcore.model_executor.expert_schemes.schemes import experts_scheme

    codes = torch.arange(32) % 16
    blocks = (codes[::2] | codes[1::2] << 4).to(torch.uint8).expand(1, 255, 1, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)
    weight = experts_scheme(Mxfp4Format()).weight({"_blocks": blocks, "_scales": scales}, torch.float32)
    exact = NUMBERS[codes].double() * (torch.arange(255.0).double() - 127).exp2()[:, None]
    assert torch.equal(weight.numbers(torch.tensor([0]))[0], exact.float())
    assert CONFIG["quant_method"] == "mxfp4"


@pytest.mark.skipif(not is_interleaved(torch.empty(1, 16)), reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_multiply_by_interleaved_blocks(dtype):
    """Every code and exponent, of experts with no row, one, and more than are packed at a time."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (4, 48, 9, 16), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(117, 137, (4, 48, 9), dtype=torch.uint8, generator=generator)
    scheme = Mxfp4Scheme(Mxfp4Format())
    codes = E2m1Codes(blocks.clone().flatten(0, 1).flatten(1))
    scales = exponents.clone().flatten(0, 1).view(torch.float8_e8m0fnu)
    weights = QuantizedMatrix(codes, scales, Groups(32)).expanded(0, 4 * 48).view(4, 48, 288)
    stored = {"_blocks": blocks.clone(), "_scales": exponents.clone()}
    for suffix, tensor in stored.items():
        scheme.arrangement(suffix).arrange(tensor)
    experts = scheme.weight(stored, dtype)
    assert torch.equal(experts.numbers(torch.tensor([3, 0])), weights[[3, 0]])
    ends = torch.tensor([1, 1, 4, 604], dtype=torch.int32)
    of_row = torch.arange(4).repeat_interleave(torch.tensor([1, 0, 3, 600]))
    rows = torch.randn(604, 288, generator=generator).to(dtype)
    expected = torch.cat([rows[of_row == e].double() @ weights[e].double().T for e in range(4)])
    sums = torch.cat([rows[of_row == e].double().abs() @ weights[e].double().abs().T for e in range(4)])
    error = (experts.product(rows, of_row, ends).double() - expected).abs()
    assert (error <= 1e-5 * sums + torch.finfo(dtype).eps * expected.abs()).all()
    for suffix, tensor in stored.items():
        scheme.arrangement(suffix).restore(tensor)
    assert torch.equal(stored["_blocks"], blocks)
    assert torch.equal(stored["_scales"], exponents)
