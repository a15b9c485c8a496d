"""The accuracy benchmark on a tiny model: a file per type, scores of every token, and the table."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.accuracy import SCHEMES, _measurements, errors, table
from benchmarks.driver import BenchmarkError
from benchmarks.gguf_files import write_gguf
from benchmarks.peers.accuracy_ringcore import AccuracyChild
from benchmarks.result import Findings, Measurement, Result
from ringcore.checkpoint.gguf_tensors import GGUFTensors
from ringcore.families import FAMILIES


def test_errors() -> None:
    reference = [-1.0] * 100
    scores = [-1.0 - 0.01 * index for index in range(100)]
    mean, high = errors(scores, reference)
    assert mean == pytest.approx(0.495)
    assert high == pytest.approx(0.98)
    assert errors(reference, reference) == (0, 0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_a_file_of_one_type(tiny_qwen2: str, tmp_path: Path, kind: str) -> None:
    write_gguf(tiny_qwen2, tmp_path / "x.gguf", kind)
    tensors = GGUFTensors(tmp_path / "x.gguf", FAMILIES)
    expected = load_file(Path(tiny_qwen2, "model.safetensors"))
    assert set(tensors.shapes) == set(expected)
    assert {kind_ for name, kind_ in tensors.kinds().items() if "_proj" in name} == {kind}
    for name, shape in tensors.shapes.items():
        values, true = torch.from_numpy(tensors.read(name)), expected[name].float()
        assert tuple(true.shape) == shape
        allowed = (0.005 if kind == "Q8_0" else 0.07) * true.abs().max() if "_proj.weight" in name else 1e-3
        assert (values - true).abs().max() <= allowed, name


def with_tokenizer(model: str, folder: Path) -> str:
    """A copy of the model, whose tokens are numbers."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(320)}, "0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return str(folder)


@pytest.mark.long_form
def test_scores_are_those_of_the_text(tiny_qwen2: str, tmp_path: Path) -> None:
    child = AccuracyChild()
    child.load(
        with_tokenizer(tiny_qwen2, tmp_path), {"executor": "uniproc", "kv_cache_bytes": 1 << 22, "max_model_len": 64}
    )
    text = " ".join(map(str, [*range(3, 23), *range(40, 60), 7, 8]))
    windows = child.windows(text, 3, 20)
    assert windows == [list(range(3, 23)), list(range(40, 60))]
    assert child.windows(text, 1, 20) == windows[:1]
    assert child.windows(text, 1, 50) == []
    scheme = SCHEMES["GGUF Q8_0"]
    found = child.score(windows, scheme.options, scheme.gguf_type)
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tiny_qwen2, dtype=torch.float32)(torch.tensor(windows)).logits
    expected = logits[:, :-1].log_softmax(-1).gather(-1, torch.tensor(windows)[:, 1:, None]).flatten()
    mean, high = errors(found, expected.tolist())
    assert 0 < mean < 0.05
    assert high < 0.3 < expected.std()  # of another token it would be as far as they are from each other


def test_the_table() -> None:
    measurements = [
        Measurement(name=f"{name}, {kind}", unit="", higher_is_better=False, samples={"ringcore": [value]})
        for name in SCHEMES
        for kind, value in (("perplexity", 9.87654), ("mean error", 0.0123456), ("99th percentile of the error", 0.5))
    ]
    findings = Findings(measurements=measurements, engines={}, conditions=[])
    result = Result(benchmark="accuracy", command="", date="", commit="", machine={}, rounds=1, findings=findings)
    lines = table({"accuracy": result}).splitlines()
    assert len(lines) == 2 + len(SCHEMES)
    assert lines[4] == '| `quantization="fp8"` | 8 | 9.877 | 0.0123 | 0.500 |'
    assert table({}) == ""


def test_a_model_that_cannot_be_written(tiny_qwen2: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_qwen2, tmp_path / "scaled"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BenchmarkError, match="give a dense Llama"):
        write_gguf(str(folder), tmp_path / "x.gguf", "Q8_0")


def test_perplexity() -> None:
    one, *_ = _measurements("x", [-math.log(4)] * 3, [-1.0] * 3)
    assert one.samples["ringcore"] == [pytest.approx(4)]
