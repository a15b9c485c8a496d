"""Seconds from a file in the page cache to a bound model on a CPU, of weights that stay quantized."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from benchmarks.driver import BenchmarkError
from benchmarks.gguf_files import write_header
from benchmarks.harness import Benchmark, Plan, interleave, note
from benchmarks.models import MODELS
from benchmarks.result import Findings, Measurement
from ringcore.checkpoint import ModelSpec, find_model, read_model_spec
from ringcore.checkpoint.gguf_names import gguf_tensor_names
from ringcore.checkpoint.quantization import GGUF_BLOCKS
from ringcore.config.gguf_weights import with_gguf_weights
from ringcore.distributed.parallel import SingleRank
from ringcore.families import FAMILIES
from ringcore.host.resources import Host
from ringcore.model_executor.loader import pending_weights
from ringcore.model_executor.models import build_model

__all__ = ["PackedLoad", "load", "write_model"]

SHAPE = "Qwen3-8B"
FORMATS: Mapping[str, str] = {"Q4_0": SHAPE, "Q4_K": SHAPE, "Q8_0": SHAPE, "AWQ": f"{SHAPE}-AWQ", "FP8": f"{SHAPE}-FP8"}
MAX_LEN = 1024


class PackedLoad(Benchmark):
    """seconds to read, rearrange and bind quantized weights of an 8B model on a CPU"""

    needs_model: ClassVar[bool] = False
    default_rounds: ClassVar[int] = 2

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--formats", nargs="+", default=list(FORMATS), help=f"of {', '.join(FORMATS)}")
        parser.add_argument("--layers", type=int, default=36, help=f"of {SHAPE}, which has 36 (default: 36)")

    def run(self, plan: Plan) -> Findings:
        unknown = set(plan.options.formats) - set(FORMATS)
        if unknown:
            raise BenchmarkError(f"--formats {' '.join(sorted(unknown))}: there are {', '.join(FORMATS)}")
        measurements = []
        for name in plan.options.formats:
            with tempfile.TemporaryDirectory(prefix="packed-load-") as folder:
                config = {**MODELS[FORMATS[name]].config, "num_hidden_layers": plan.options.layers}
                model = write_model(Path(folder), name, config)
                size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e9

                def turn(_: str, round_: int, name: str = name, model: Path = model, size: float = size) -> float:
                    seconds = load(model)
                    note(f"{name} of {size:.2f} GB, round {round_}: {seconds:.2f} s")
                    return seconds

                samples = interleave(["ringcore"], plan.rounds, turn)
            title = f"{name}, {size:.2f} GB"
            measurements.append(Measurement(name=title, unit="s", higher_is_better=False, samples=samples))
        packages = {"torch": str(torch.__version__), "gguf": version("gguf")}
        return Findings(
            measurements=measurements,
            engines={"ringcore": {"packages": packages, "settings": {}, "env": {}}},
            conditions=[
                f"{SHAPE} with {plan.options.layers} layers, random bytes, files in the page cache; one rank, "
                f"{torch.get_num_threads()} threads, GGUF files in float32, others in bfloat16. From opened files to "
                "the bound model.",
            ],
        )


def load(model: Path) -> float:
    """Seconds."""
    files = find_model(str(model))
    spec = read_model_spec(files, FAMILIES)
    assert isinstance(spec, ModelSpec)
    dtype = torch.bfloat16
    if model.suffix == ".gguf":
        spec, dtype = with_gguf_weights(spec, files, "packed", "float32", "cpu", Host()), torch.float32
    begin = time.perf_counter()
    built = build_model(spec, SingleRank(), dtype, MAX_LEN)
    with pending_weights(built.weights(), files, 0, torch.device("cpu")) as pending:
        built.bind(pending)
    return time.perf_counter() - begin


def write_model(folder: Path, name: str, config: Mapping[str, Any]) -> Path:
    """The folder of a model of random weights, or of a GGUF type its file in there. name: of `FORMATS`."""
    (folder / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(find_model(str(folder), "dummy"), FAMILIES)
    assert isinstance(spec, ModelSpec)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for weight in build_model(spec, SingleRank(), torch.float16, MAX_LEN).weights():
        for part in weight.parts:
            shapes[part.checkpoint_name] = part.checkpoint_shape, weight.checkpoint_dtype
    if name in GGUF_BLOCKS:
        (folder / "config.json").unlink()
        return _as_gguf(folder / "model.gguf", spec, {key: shape for key, (shape, _) in shapes.items()}, name)
    for number, (key, (shape, dtype)) in enumerate(shapes.items()):
        save_file({key: _random(shape, dtype)}, folder / f"model-{number:05}.safetensors")
    index = {key: f"model-{number:05}.safetensors" for number, key in enumerate(shapes)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype in (torch.float16, torch.float32):
        return torch.rand(shape, dtype=dtype)
    numbers = torch.randint(0, 100, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    return numbers.view(dtype).view(shape)


def _as_gguf(path: Path, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], kind: str) -> Path:
    family = FAMILIES[spec.architecture]
    assert family.gguf is not None
    writer: Any = gguf.GGUFWriter(path, family.gguf.name, use_temp_file=True)
    write_header(writer, spec)
    numbers, num_bytes = GGUF_BLOCKS[kind]
    for name, stored in gguf_tensor_names(family, spec.num_layers).items():
        shape = shapes.get(name)
        if shape is None:
            continue
        if len(shape) == 1:
            writer.add_tensor(stored, np.ones(shape, np.float32))
        else:
            rows = np.random.default_rng(1).integers(0, 100, (shape[0], shape[1] // numbers * num_bytes), np.uint8)
            writer.add_tensor(stored, rows, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
