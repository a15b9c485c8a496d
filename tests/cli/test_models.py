"""`ringcore models`."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import models_page
from ringcore.cli.app import make_app
from ringcore.cli.models import formats_in_words, in_words


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    types = ["llama", "olmo2", "gemma2", "gpt_oss", "gpt2", "qwen3_moe"]
    types += ["mamba", "qwen3_next", "falcon", "llava", "bart", "nothing"]
    result = CliRunner().invoke(make_app(["models"]), ["models", "--json", *types], catch_exceptions=False)
    assert result.exit_code == 0
    return {row["model_type"]: row for row in map(json.loads, result.stdout.splitlines())}


def test_what_serves_each_type(rows):
    served = {name: row["model_impl"] for name, row in rows.items()}
    others = ["olmo2", "gemma2", "gpt_oss", "gpt2", "llava"]
    by_transformers = dict.fromkeys(others, "transformers")
    refused = dict.fromkeys(["mamba", "qwen3_next", "falcon", "bart", "nothing"], "refused")
    assert served == {"llama": "native", "qwen3_moe": "native", **by_transformers, **refused}


def test_what_is_seen_of_a_type(rows):
    assert rows["gemma2"]["attention"] == ["sliding window", "softcap"]
    assert rows["gpt_oss"]["attention"] == ["sinks", "sliding window"]
    assert (rows["olmo2"]["kv_cache"], rows["gemma2"]["kv_cache"]) == (["full"], ["full", "sliding window"])
    assert (rows["olmo2"]["tensor_parallel"], rows["gpt2"]["tensor_parallel"]) == (True, False)
    assert [name for name, row in rows.items() if row["gguf"]] == ["llama", "gemma2", "gpt_oss", "gpt2", "qwen3_moe"]
    assert {row["kept_from_graphs"] for row in rows.values()} == {""}
    fused = [rows[name]["fused"] for name in ("olmo2", "qwen3_moe", "gpt2")]
    assert fused == ["all", "layers, attentions, experts", ""]


def test_what_each_of_two_ranks_holds(rows):
    assert (rows["olmo2"]["share_of_two"], rows["gpt2"]["share_of_two"]) == (0.5, 1.0)
    assert rows["qwen3_moe"]["share_of_two"] == 0.5  # but for the router, which is whole on both


def test_why_a_type_is_refused(rows):
    assert "in convolution" in rows["mamba"]["reason"]  # not that it has no limit of positions
    assert "in convolution" in rows["qwen3_next"]["reason"]
    assert "its own code" in rows["falcon"]["reason"]
    assert rows["nothing"]["reason"] == "transformers has no causal LM of this type"
    assert rows["llama"]["reason"] == ""


def test_what_a_refused_type_needs(rows):
    needs = {name: (row["needs"].split(":")[0], row["is_planned"]) for name, row in rows.items() if row["needs"]}
    assert needs == {
        "mamba": ("state layers", True),
        "qwen3_next": ("state layers", True),
        "falcon": ("a class whose attention goes through transformers' interface", False),
        "bart": ("a decoder alone, whose tokens see earlier ones", False),
        "nothing": ("a transformers that has one", False),
    }


def test_the_page_of_models_says_what_is_so(rows):
    listing = models_page.read(models_page.RESULTS / "types.json", models_page.Listing)
    if listing.transformers != version("transformers"):
        pytest.skip(f"the page is of transformers {listing.transformers}")
    told = {row["model_type"]: row for row in listing.types}
    for name in rows.keys() - {"nothing"}:
        assert told[name] == {fact: value for fact, value in rows[name].items() if value}


def test_formats_of_quantized_weights():
    """As the guide has them, without the models."""
    by_method, on_load, in_gguf = formats_in_words().strip().splitlines()
    assert by_method.endswith("by quant_method: awq, compressed-tensors, fp8, gptq, mxfp4")
    assert on_load.endswith("quantization: fp8, int4")
    guide = (Path(__file__).parents[2] / "docs/guide/quantization.md").read_text()
    kinds = in_gguf.partition("gguf_weights: ")[2].partition(";")[0].split(", ")
    assert len(kinds) == 9
    assert all(kind in guide for kind in kinds)


def test_a_line_a_type(rows):
    lines = {name: " ".join(in_words(row).split()) for name, row in rows.items()}
    split = "tensor parallel (each of two ranks 50%), fused: all, GGUF"
    assert lines["gemma2"] == f"gemma2 transformers sliding window, softcap, {split}"
    assert lines["llama"] == f"llama native {split}"
    assert lines["gpt2"] == "gpt2 transformers GGUF"
    assert lines["llava"].startswith("llava transformers text only, tensor parallel")
    alone = rows["olmo2"] | {"share_of_two": None, "two_ranks_refused": "its heads"}
    assert " one rank alone: its heads" in in_words(alone)
    assert lines["falcon"].startswith("falcon refused its attention is its own code, which nothing can replace; needs ")
    assert lines["mamba"].endswith("(planned)")
