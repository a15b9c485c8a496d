"""`quantization_config`: what is read of it, for which matrices, and what is refused by its name."""

import copy
import json

import pytest
from raw_files import model_folder

from ringcore.checkpoint import find_model, read_model_spec
from ringcore.checkpoint.expected_tensors import is_dispensable
from ringcore.checkpoint.quantization import (
    AwqFormat,
    CodesFormat,
    GptqFormat,
    InputFormat,
    Mxfp4Format,
    OnLoadFormat,
    PackedFormat,
)
from ringcore.checkpoint.quantization.rules import matches
from ringcore.checkpoint.quantization.shares import refused_shares
from ringcore.config.expert_formats import check_experts
from ringcore.errors import ConfigError, ModelLoadError
from ringcore.families import FAMILIES
from ringcore.host.resources import Host

Q_PROJ = "model.layers.0.self_attn.q_proj"
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
PER_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
FLOATS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "GEMM"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": True, "damp_percent": 0.01}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def with_(config, **changed):
    """Dots in a name: `__`."""
    config = copy.deepcopy(config)
    for path, value in changed.items():
        *parents, leaf = path.split("__")
        at = config
        for parent in parents:
            at = at[parent]
        at[leaf] = value
    return config


def group(**changed):
    return with_(PACKED, **{f"config_groups__group_0__{name}": value for name, value in changed.items()})


def read(folder, config, quantization=None, **model):
    folder = model_folder(folder, quantization_config=config, **model)
    return read_model_spec(find_model(folder, "dummy"), FAMILIES, quantization=quantization).quantization


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (PACKED, PackedFormat(4, 16)),
        (group(weights__symmetric=False, weights__actorder="group"), PackedFormat(4, 16, True, True)),
        (group(weights__strategy="channel", weights__actorder="static"), PackedFormat(4, None)),
        (group(weights__num_bits=8), PackedFormat(8, 16)),
        (
            group(format="float-quantized", weights=FLOATS, input_activations=PER_TOKEN),
            CodesFormat("fp8", "channel", inputs=InputFormat("fp8", "token")),
        ),
        (
            group(
                format="float-quantized",
                weights=FLOATS | {"strategy": "tensor"},
                input_activations=PER_TOKEN | {"dynamic": False, "strategy": "tensor"},
            ),
            CodesFormat("fp8", "tensor", inputs=InputFormat("fp8", "tensor")),
        ),
        (
            group(format="naive-quantized", weights=FLOATS | {"strategy": "block", "block_structure": [128, 64]}),
            CodesFormat("fp8", "block", (128, 64)),
        ),
        (
            group(
                format="int-quantized", weights=FLOATS | {"type": "int"}, input_activations=PER_TOKEN | {"type": "int"}
            ),
            CodesFormat("int8", "channel", inputs=InputFormat("int8", "token")),
        ),
        (AWQ, AwqFormat(16)),
        (with_(AWQ, group_size=-1, modules_to_not_convert=None), AwqFormat(None)),
        (GPTQ, GptqFormat(4, 16, True)),
        (with_(GPTQ, bits=8, desc_act=False, meta={"quantizer": ["x:1"]}), GptqFormat(8, 16)),
        (FP8, CodesFormat("fp8", "block", (128, 128), "weight_scale_inv", InputFormat("fp8", "group", 128))),
    ],
)
def test_formats(tmp_path, config, expected):
    found = read(tmp_path / "m", config)
    assert found.format_of(Q_PROJ) == expected
    assert found.format_of("lm_head") is None
    assert found.method == config["quant_method"]
    assert not found.is_on_load


def test_fp8_scales_of_a_kv_cache_are_left_to_the_engine(tmp_path):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert read(tmp_path / "m", with_(PACKED, kv_cache_scheme=scheme)) == read(tmp_path / "n", PACKED)
    assert is_dispensable("model.layers.0.self_attn.k_scale")
    assert not is_dispensable("model.layers.0.self_attn.q_proj.k_scale")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"quant_method": "bitnet"},
            r"'quantization_config.quant_method' is 'bitnet'; known: 'awq', 'compressed-tensors'",
        ),
        ({}, "'quantization_config' is empty"),
        (with_(PACKED, format="marlin-24"), "'.*group_0.format' is 'marlin-24'; known: 'pack-quantized'"),
        (
            with_(PACKED, kv_cache_scheme={"num_bits": 8, "type": "int"}),
            r"'quantization_config.kv_cache_scheme' is {'num_bits': 8, 'type': 'int'}, .* type 'float'; save",
        ),
        (with_(PACKED, sparsity_config={"format": "sparse-24-bitmask"}), "'.*sparsity_config' is"),
        (with_(PACKED, transform_config={"config_groups": {}}), "'.*transform_config' is"),
        (with_(PACKED, novel=3), "'quantization_config.novel' is 3, which is not known here"),
        (
            with_(PACKED, ignore=["re:(["]),
            r"'quantization_config.ignore' has 're:\(\[', which is no regular expression",
        ),
        (with_(PACKED, ignore="lm_head"), "'quantization_config.ignore' is lm_head, a list of names"),
        (with_(PACKED, quantization_status="calibration"), "quantization_status' is 'calibration'; known:"),
        (group(weights__num_bits=3), "'.*weights.num_bits' is 3; known: 4, 8; quantize to 4 or 8 bits"),
        (group(weights__type="float"), "'.*weights.type' is 'float'"),
        (group(weights__strategy="tensor_group"), "'.*weights.strategy' is 'tensor_group'"),
        (group(weights__group_size=0), "'.*weights.group_size' is 0"),
        (group(weights__dynamic=True), "'.*weights.dynamic' is True"),
        (group(weights=None), "'.*weights' is missing"),
        (group(weights__actorder="fancy"), "'.*weights.actorder' is 'fancy'"),
        (group(input_activations=PER_TOKEN), "'.*input_activations' is present, which 'pack-quantized' has no product"),
        (group(output_activations=PER_TOKEN), "'.*output_activations' is present"),
        (
            group(format="float-quantized", weights=FLOATS, input_activations=PER_TOKEN | {"strategy": "tensor"}),
            "'.*input_activations.strategy' is 'tensor'; known: 'token', 'group'",
        ),
        (group(format="float-quantized", weights=FLOATS | {"num_bits": 4}), "'.*weights.num_bits' is 4; known: 8"),
        (with_(AWQ, bits=3), "'quantization_config.bits' is 3; known: 4"),
        (with_(AWQ, version="gemv"), "version' is 'gemv'"),
        (with_(AWQ, zero_point=False), "zero_point' is False"),
        (with_(GPTQ, checkpoint_format="gptq_v2"), "checkpoint_format' is 'gptq_v2'; known: 'gptq'"),
        (with_(GPTQ, dynamic={"-:x": {}}), "dynamic' is"),
        (with_(GPTQ, bits=2), "bits' is 2"),
        (with_(MXFP4, modules_to_not_convert=["lm_head", "mlp.experts"]), "has 'mlp.experts': experts are all"),
        (with_(MXFP4, dequantize=True), "dequantize' is True"),
        (with_(MXFP4, group_size=16), "group_size' is 16, which is not known here"),
        (MXFP4, "'quantization_config' is 'mxfp4', which is of experts of transformers' models"),
        (with_(FP8, fmt="e5m2"), "fmt' is 'e5m2'"),
        (with_(FP8, scale_fmt="ue8m0"), "scale_fmt' is 'ue8m0', which is not known here"),
        (with_(FP8, activation_scheme="static"), "activation_scheme' is 'static'"),
        (with_(FP8, weight_block_size=None), "weight_block_size' is missing"),
        (with_(FP8, weight_block_size=[128]), r"weight_block_size' is \[128\], a list of two sizes"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(tmp_path, config, match):
    with pytest.raises(ModelLoadError, match=match) as caught:
        read(tmp_path / "m", config)
    assert caught.value.details["path"].endswith("config.json")


def test_mxfp4_is_of_experts_alone(tmp_path):
    found = read(tmp_path / "m", MXFP4, model_type="gpt_oss", architectures=["GptOssForCausalLM"])
    assert found.experts == Mxfp4Format()
    assert found.format_of(Q_PROJ) is None
    with pytest.raises(ModelLoadError, match="quantization='int4' needs a 16-bit checkpoint"):
        read(tmp_path / "n", MXFP4, "int4", model_type="gpt_oss", architectures=["GptOssForCausalLM"])


def test_rules_by_the_name_of_a_matrix(tmp_path):
    other = {"targets": ["re:.*mlp.*"], "weights": WEIGHTS | {"num_bits": 8}}
    config = with_(PACKED, ignore=["lm_head", "model.layers.1", r"re:.*\.k_proj$"])
    config["config_groups"]["group_1"] = other
    found = read(tmp_path / "m", config)
    bits = {name: getattr(found.format_of(f"model.layers.{name}"), "bits", None) for name in (
        "0.mlp.up_proj", "0.self_attn.q_proj", "0.self_attn.k_proj", "1.mlp.up_proj", "11.mlp.up_proj"
    )}  # fmt: skip
    assert list(bits.values()) == [8, 4, None, None, 8]


def test_a_pattern_is_of_whole_components():
    assert matches(["mlp.gate"], "model.layers.0.mlp.gate")
    assert not matches(["mlp.gate"], "model.layers.0.mlp.gate_proj")
    assert matches(["layers.1"], "model.layers.1.x")
    assert not matches(["layers.1"], "model.layers.11.x")
    assert not matches(["re:layers"], "model.layers.1")  # from the beginning


def test_a_tied_head_is_dense(tmp_path):
    config = with_(PACKED, ignore=[])
    assert read(tmp_path / "a", config).format_of("lm_head") is not None
    assert read(tmp_path / "b", config, tie_word_embeddings=True).format_of("lm_head") is None
    assert read(tmp_path / "c", with_(GPTQ, lm_head=True)).format_of("lm_head") == GptqFormat(4, 16, True)


def test_on_load(tmp_path):
    found = read(tmp_path / "m", None, "int4")
    assert found.is_on_load
    assert found.format_of(Q_PROJ) == OnLoadFormat("int4")
    assert found.format_of("lm_head") is None
    assert read(tmp_path / "n", None) is None
    with pytest.raises(ModelLoadError, match="'quantization_config' is present, and quantization='fp8' needs a 16-bit"):
        read(tmp_path / "o", AWQ, "fp8")


def test_experts_on_load_and_of_awq(tmp_path):
    model = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    }
    expert = "model.layers.0.mlp.experts.0.up_proj"
    found = read(tmp_path / "a", None, "int4", **model)
    assert found.format_of(Q_PROJ) == found.format_of(expert) == OnLoadFormat("int4")
    assert read(tmp_path / "b", AWQ, **model).format_of(expert) == AwqFormat(16)
    ignoring = with_(AWQ, modules_to_not_convert=["mlp.experts", "mlp.gate"])
    assert read(tmp_path / "c", ignoring, **model).format_of(expert) is None


def test_shares_that_cut_a_word_are_refused(tmp_path):
    """32 hidden, 4 heads of 8, 2 KV heads, 64 inner: groups may be cut, words may not."""
    folder = model_folder(tmp_path / "m", quantization_config=with_(PACKED), head_dim=6, intermediate_size=40)
    spec = read_model_spec(find_model(folder, "dummy"), FAMILIES)
    assert refused_shares(spec, 1) is None
    assert refused_shares(spec, 2) == (
        "a rank's share of 'model.layers.0.self_attn.o_proj' is 12 inputs, and its tensor 'weight_packed' packs 8 in a "
        "word"
    )
    (tmp_path / "m" / "config.json").write_text(
        json.dumps(json.loads((folder / "config.json").read_text()) | {"head_dim": 12, "quantization_config": AWQ})
    )
    spec = read_model_spec(find_model(folder, "dummy"), FAMILIES)
    assert "k_proj' is 12 outputs, and its tensor 'qweight' packs 8" in refused_shares(spec, 2)


def test_a_router_is_dense_and_experts_where_they_can_be_stacked_are_not(tmp_path):
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "mlp_only_layers": [0]}
    on_load = read(tmp_path, None, "int4", **mixture)
    experts = [f"model.layers.1.mlp.{name}" for name in ("gate", "experts.0.gate_proj", "experts.3.down_proj")]
    assert [on_load.format_of(name) is None for name in experts] == [True, False, False]
    assert None not in [on_load.format_of(name) for name in (Q_PROJ, "model.layers.0.mlp.gate_proj")]
    kept = with_(PACKED, ignore=["lm_head", "re:.*experts.*"])
    assert read(tmp_path, kept, **mixture).format_of(Q_PROJ) == PackedFormat(4, 16)
    for quantized in (PACKED, FP8):
        found = read(tmp_path, quantized, **mixture)
        assert [found.format_of(name) is None for name in experts] == [True, False, False]
    assert read(tmp_path, group(weights__actorder="group"), **mixture).format_of(experts[1]).has_order
    inputs = PER_TOKEN | {"dynamic": False, "strategy": "tensor"}
    static = group(format="float-quantized", weights=FLOATS, input_activations=inputs)
    with pytest.raises(ModelLoadError, match="quantizes experts in 'compressed-tensors', with a scale of the inputs"):
        read(tmp_path, static, **mixture)


class WithGpu(Host):
    def has_gpu(self):
        return True


def test_experts_on_a_gpu(tmp_path):
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}

    def spec(number, config, **options):
        folder = model_folder(tmp_path, **mixture, **({} if config is None else {"quantization_config": config}))
        read = read_model_spec(find_model(folder, "dummy"), FAMILIES, quantization=number)
        check_experts(read, options.get("device", "auto"), options.get("host", WithGpu()))
        return read

    expert = "model.layers.0.mlp.experts.0.up_proj"
    assert spec("int4", None).quantization.format_of(expert) is not None
    assert spec(None, AWQ).quantization.format_of(expert) is not None
    ordered = group(weights__actorder="group")
    with pytest.raises(ConfigError, match="device='auto': a GPU has no kernels for experts in act-order; give"):
        spec(None, ordered)
    assert spec(None, ordered, device="cpu").quantization.format_of(expert).has_order
