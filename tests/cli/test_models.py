"""`ringcore models`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ringcore.cli.app import make_app


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    types = ["llama", "olmo2", "gemma2", "gpt_oss", "gpt2", "mamba", "qwen3_next", "falcon", "nothing"]
    result = CliRunner().invoke(make_app(), ["models", "--json", *types], catch_exceptions=False)
    assert result.exit_code == 0
    return {row["model_type"]: row for row in map(json.loads, result.stdout.splitlines())}


def test_what_serves_each_type(rows):
    served = {name: row["model_impl"] for name, row in rows.items()}
    by_transformers = dict.fromkeys(["olmo2", "gemma2", "gpt_oss", "gpt2"], "transformers")
    refused = dict.fromkeys(["mamba", "qwen3_next", "falcon", "nothing"], "refused")
    assert served == {"llama": "native", **by_transformers, **refused}


def test_what_is_seen_of_a_type(rows):
    assert rows["gemma2"]["attention"] == ["sliding window", "softcap"]
    assert rows["gpt_oss"]["attention"] == ["sinks", "sliding window"]
    assert (rows["olmo2"]["tensor_parallel"], rows["gpt2"]["tensor_parallel"]) == (True, False)
    assert [name for name, row in rows.items() if row["gguf"]] == ["llama", "gemma2", "gpt_oss", "gpt2"]


def test_why_a_type_is_refused(rows):
    assert "max_position_embeddings' is missing" in rows["mamba"]["reason"]
    assert "in convolution" in rows["qwen3_next"]["reason"]
    assert "its own code" in rows["falcon"]["reason"]
    assert rows["nothing"]["reason"] == "transformers has no causal LM of this type"
    assert rows["llama"]["reason"] == ""


def test_a_line_a_type():
    result = CliRunner().invoke(make_app(), ["models", "olmo2"], catch_exceptions=False)
    assert result.stdout.split() == ["olmo2", "transformers", "tensor", "parallel"]
